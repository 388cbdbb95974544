"""What commands share of their arguments: options, layers, files and databases, scripts."""
