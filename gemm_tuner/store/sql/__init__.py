"""The engines, the tables, and how statements run on them."""
