"""What a run keeps: checkpoints, whose folder it is, copies of them, its first weights."""
