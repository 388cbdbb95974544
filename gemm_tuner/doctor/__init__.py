"""Checks of a machine: whether it measures well, and whether tuning has what it needs."""
