"""Answers to questions, in words and in JSON, but for their dates and signatures."""
