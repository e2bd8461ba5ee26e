// A kernel.
