"""`python -m gemm_tuner`, which is the same as the command `gemm-tuner`."""

from gemm_tuner.cli.main import main

if __name__ == "__main__":
    main()
