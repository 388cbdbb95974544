"""The search space: which kernels exist, which can work, and which look fast."""
