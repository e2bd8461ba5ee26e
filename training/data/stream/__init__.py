"""Texts that are tokenized as they are read; see training.data.stream.feed."""
