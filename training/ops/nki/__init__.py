"""NKI kernels for Mamba-2 on Trainium: SSD and the causal convolution, forward and backward."""
