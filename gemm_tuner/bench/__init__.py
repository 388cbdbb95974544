"""Proof and timing: verify a kernel in a process that may die, then time it beside a baseline."""
