"""The command line: the commands, and the steps from a recipe to a smoke-tested squash file."""
