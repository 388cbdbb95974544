"""The client: from a problem to a callable kernel, through a cache and a service."""
