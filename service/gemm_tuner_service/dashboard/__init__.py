"""Pages for people: what the service knows and does, made of what its other routes tell."""
