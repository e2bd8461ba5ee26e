"""Training data: each rank reads its own part, and checkpoints record the position in it."""
