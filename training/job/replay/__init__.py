"""Find a node that computes wrong: run the same steps on every node, and compare the bits.

Training is deterministic, so nodes that take the same steps from one checkpoint with the same
samples give the same bits. A node that does not has a fault that nothing else shows: silent data
corruption, for example in a GPU, memory or a processor. docs/training/failures.md says when this is
done.
"""
