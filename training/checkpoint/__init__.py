"""What a run keeps: checkpoints, whose folder it is, where they are copied, its first weights."""
