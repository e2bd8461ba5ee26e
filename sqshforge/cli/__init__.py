"""The command line: the commands, and the way of a target from recipe to proven squash file."""
