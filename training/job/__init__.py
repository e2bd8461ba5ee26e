"""From what Slurm and the node say to the processes of a node: see training.launch."""
