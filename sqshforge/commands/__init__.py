"""What the command line can do, a file for each kind of work.

Commands import the modules that they use when they are called, so that `sqshforge run`, which
stands between Slurm and a training process, starts fast.
"""

from sqshforge.commands import cache, images, look, recipes, squash, start, status

COMMANDS = (
    *recipes.COMMANDS,
    *images.COMMANDS,
    *squash.COMMANDS,
    *cache.COMMANDS,
    *look.COMMANDS,
    *start.COMMANDS,
    *status.COMMANDS,
)
