"""Load kernels into this process and call them on arrays."""
