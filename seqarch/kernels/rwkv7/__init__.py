"""The recurrence of RWKV-7."""
