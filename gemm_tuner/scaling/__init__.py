"""How the time of a call follows from the number of threads that share it."""
