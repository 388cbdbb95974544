"""Who asks, and how much they may: peers, tokens, sessions of browsers, limits."""
