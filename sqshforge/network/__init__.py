"""Access to the network from this machine: settings, mirrors, registries, downloads."""
