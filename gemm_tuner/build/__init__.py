"""From a generated source to a binary named by its content."""
