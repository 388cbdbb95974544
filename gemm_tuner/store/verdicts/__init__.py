"""Verdicts: derived from trials, kept ready, and asked for."""
