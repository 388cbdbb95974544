"""Searches run again on what was recorded, without the machine."""
