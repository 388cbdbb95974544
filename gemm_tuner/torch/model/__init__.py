"""A whole model: what it computes, how near it is to another, which layer is wrong, tuning it."""
