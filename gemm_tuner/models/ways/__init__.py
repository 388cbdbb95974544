"""Ways to run a model, one file for each package; each has its rows in `ROWS`."""
