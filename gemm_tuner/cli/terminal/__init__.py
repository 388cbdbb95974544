"""What commands share of the terminal: lines, progress, Ctrl-C, waiting for who measures."""
