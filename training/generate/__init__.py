"""Generate text with a trained model: `python -m training.generate`."""
