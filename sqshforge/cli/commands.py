"""What the command line can do, a file for each kind of work.

Commands import the modules that they use when they are called, so that `sqshforge run`, which
stands between Slurm and a training process, starts fast.
"""

from sqshforge.cli import cache, images, inspect, squash, start, status, targets

COMMANDS = (
    *targets.COMMANDS,
    *images.COMMANDS,
    *squash.COMMANDS,
    *cache.COMMANDS,
    *inspect.COMMANDS,
    *start.COMMANDS,
    *status.COMMANDS,
)
