"""`python -m sqshforge`: the same as the command `sqshforge`."""

from sqshforge.cli.main import main

main()
