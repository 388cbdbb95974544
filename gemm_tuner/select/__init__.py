"""Selection: from the trials in the store to a verdict and its reasons."""
