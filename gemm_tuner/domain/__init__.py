"""The nouns: frozen values without input or output, on the standard library alone."""
