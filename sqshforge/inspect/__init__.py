"""Examine squash files: what is in one, what differs between two, whether one is intact."""
