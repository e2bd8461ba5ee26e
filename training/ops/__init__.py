"""The operations that models are made of, one file each, in plain PyTorch."""
