"""One run a folder; see training.claim.claim."""
