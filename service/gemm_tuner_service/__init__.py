"""The service: it answers which kernel should run a problem, from what is in the store."""
