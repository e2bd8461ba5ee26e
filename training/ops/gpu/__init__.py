"""GPU kernels of our own, in Triton."""
