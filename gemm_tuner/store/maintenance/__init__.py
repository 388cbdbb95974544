"""A whole database: examined, checked, copied and pruned."""
