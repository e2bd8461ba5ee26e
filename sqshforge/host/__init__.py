"""Access to this machine: programs, files, locks, network, namespaces, terminal."""
