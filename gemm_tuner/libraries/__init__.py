"""Other libraries that compute a layer: oneDNN, OpenBLAS, NumPy."""
