"""The JSON documents of what the store keeps."""
