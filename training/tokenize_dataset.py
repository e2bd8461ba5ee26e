"""Alias of `python -m training.data.tokenize`, named as in the Mamba-2 system for Neuron."""

from __future__ import annotations

import sys

from training.data.tokenize.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
