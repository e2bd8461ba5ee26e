"""The training loop: set-up, steps, metrics."""
