"""Layers that find their kernels: where these come from, and the layer for NumPy."""
