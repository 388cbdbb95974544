"""Whole models, run in several ways: what `gemm-tuner bench-models` measures.

Rows of `table.py` and `ways/` name models and ways to run them, and load no PyTorch; that is done
in the process of each way.
"""
