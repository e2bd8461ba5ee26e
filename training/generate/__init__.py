"""Text written by a trained model: `python -m training.generate`."""
