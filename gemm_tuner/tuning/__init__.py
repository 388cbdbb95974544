"""Sweeps: search the candidates of a problem, keep every trial, end in verdicts."""
