"""`python -m sqshforge`: the same as the command `sqshforge`."""

from sqshforge.cli import main

main()
