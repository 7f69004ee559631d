"""Kernels of packed attention on CUDA, which hold no mask of tokens x tokens: chosen by name."""
