"""What is to be tuned: the queue, its workers, and what was asked for in vain."""
