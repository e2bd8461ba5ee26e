"""What is asked of this machine: programs, files, locks, network, namespaces, terminal."""
