"""gemm-tuner: generate, prove, time, choose and serve CPU matrix-multiplication kernels."""
