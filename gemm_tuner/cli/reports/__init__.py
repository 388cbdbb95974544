"""What commands say of what they found, as lines, tables, pages and pictures."""
