"""Smoke test of an image, run inside it: `python3 -m training.smoke`."""
