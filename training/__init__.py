"""Pre-training of state-space and Llama models, which runs inside every image."""
