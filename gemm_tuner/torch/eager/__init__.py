"""Modules of a model that call tuned kernels in eager mode."""
