"""Which node computes wrong: the same steps on every node, compared to the bit.

Training is deterministic, so nodes that take the same steps from one checkpoint with the same
samples give the same bits. One that does not has a fault that nothing else shows: silent data
corruption, as of a GPU, of memory or of a processor. docs/training/failures.md says when this is
done.
"""
