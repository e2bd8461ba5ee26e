"""What a run keeps: checkpoints, their copies, the lease of its folder, and its first weights."""
