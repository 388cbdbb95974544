"""From a question to a signed answer, kept, gathered and counted."""
