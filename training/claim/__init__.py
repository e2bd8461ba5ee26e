"""One run a folder: two at once would destroy each other's checkpoints.

SAVE/.running says who runs there, and has a counter that is renewed every few seconds. Neither the
locks of file systems are used, which do nothing on some shared ones, nor clocks, which differ
between hosts: who finds a claim watches its counter for longer than it takes to be renewed. Where
it stands still the run there is dead, and the next one takes the folder over.

Of many that would do so one must win. The right to follow a claim is a file that is called after
it, .running.<its id>, and that only one can make (O_EXCL). So claims are a chain, the last of which
counts; who has made one renames it to .running. Light: no torch here.
"""

from training.claim.claim import NOBODY, Claim, Own

__all__ = ["NOBODY", "Claim", "Own"]
