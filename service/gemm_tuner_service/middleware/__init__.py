"""What stands before every route: access, limits, deadlines, and what is noted of a request."""
