"""NKI as the kernels see it: the current `nki` package, or that of the pinned compiler beneath it.

The kernels are written for `nki`, whose instructions write into a tile that is given (`dst=`).
Compilers up to Neuron 2.27, as neuronx-cc 2.16, have `neuronxcc.nki` instead, whose instructions
return tiles; beta.py makes the one from the other. Raises ImportError where there is neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import nki.isa as nisa
    import nki.language as nl
    from nki import jit
except ImportError:
    from training.ops.nki.beta import jit, nisa, nl, simulate
else:

    def simulate(kernel: Any) -> Callable[..., Any]:
        """Give the kernel as a function of numpy arrays that NKI's simulator computes."""
        import nki

        run: Callable[..., Any] = nki.simulate(kernel)
        return run


__all__ = ["jit", "nisa", "nl", "simulate"]
