"""Backends, which spread training over ranks: one module each."""
