"""How this machine reaches the outside: settings, mirrors, registries, downloads."""
