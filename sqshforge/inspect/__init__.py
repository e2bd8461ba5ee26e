"""Looking at squash files: what is in one, what differs between two, whether one is whole."""
