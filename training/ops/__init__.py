"""The operations that models consist of, one per file, in plain PyTorch."""
