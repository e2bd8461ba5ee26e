"""From Slurm's variables and a node's devices to the processes of the node: see training.launch."""
