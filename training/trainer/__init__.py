"""The training loop: its parts set up, a step, what is measured."""
