"""Kernels of our own for GPUs, in Triton."""
