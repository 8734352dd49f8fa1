"""The format of a run folder: what training writes and what report and exam read. Nothing here imports torch."""
