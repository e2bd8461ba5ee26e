"""This machine: its programs, files, locks, network, user namespaces and terminal."""
