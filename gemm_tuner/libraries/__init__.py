"""Other libraries that compute a layer: oneDNN, NumPy."""
