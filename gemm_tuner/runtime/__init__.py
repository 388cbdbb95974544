"""What a program needs to call a kernel: the CPU it runs on, and kernels loaded into it."""
