"""What candidates are compared with: one library in each module."""
