"""What a run keeps: checkpoints, their copies, its claim on its folder, and its first weights."""
