"""What changes with the number of nodes: small models, each a formula and a simulation of it."""
