"""Models by their kind, one file each; each has its rows in `ROWS`."""
