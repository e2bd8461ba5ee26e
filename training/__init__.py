"""What runs inside every image: pre-training of state-space and Llama models."""
