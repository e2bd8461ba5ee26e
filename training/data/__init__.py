"""What is trained on: every rank gets its own part, and the place goes in checkpoints."""
