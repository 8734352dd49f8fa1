"""The recurrence of RWKV-5 and RWKV-6."""
