"""The store: trials that are only ever appended, artifacts by content, and their exchange."""
