"""The page of `gemm-tuner report`: what it says of a database, its plots and its HTML."""
