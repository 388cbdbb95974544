"""Strategies of a search: which candidates to try next, told how fast others were."""
