"""Recall exams: small models trained from scratch on synthetic tasks that measure what a mixer remembers."""
