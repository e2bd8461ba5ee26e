"""NKI as the kernels use it: the current `nki` package, or the pinned compiler's own.

The kernels are written for `nki`, whose instructions write into a given tile (`dst=`). Compilers up
to Neuron 2.27, such as neuronx-cc 2.16, have `neuronxcc.nki` instead, whose instructions return
tiles; beta.py adapts it. Raises ImportError if neither is installed.
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
        """Return the kernel as a function of numpy arrays, computed by NKI's simulator."""
        import nki

        run: Callable[..., Any] = nki.simulate(kernel)
        return run


__all__ = ["jit", "nisa", "nl", "simulate"]
