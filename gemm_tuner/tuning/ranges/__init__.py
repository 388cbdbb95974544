"""A range of m becomes several kernels: which formats, boundaries and kernels, in what time."""
