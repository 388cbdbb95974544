"""Arrays of callers: read in place, checked, quantised, packed."""
