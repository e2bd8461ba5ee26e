"""Watches for ranks that hang: names them, shows where all ranks are, ends the run in the end."""
