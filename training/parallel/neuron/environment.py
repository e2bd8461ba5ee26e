"""Environment variables of Neuron's compiler and runtime. No torch needed here.

Variables that are set already stay as they are: whoever starts a run decides. The values are those
of the known launcher of Mamba-2 on Neuron.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

COMPILER = "NEURON_CC_FLAGS"
CACHE = "NEURON_COMPILE_CACHE_URL"
ONLY_COMPILE = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by neuron_parallel_compile, which collects the graphs of a few steps to compile them."""

DEFAULTS = {
    COMPILER: "--model-type=transformer --distribution-strategy=llm-training",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
    # Stochastic rounding would make a repeated run differ.
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
}


def prepare(environ: MutableMapping[str, str], cache: Path) -> list[str]:
    """Set the variables that are not set, and list the values that then apply.

    cache: folder of compiled graphs, on a disk that all nodes share; ignored if the environment
    names one, in its own variable or in the compiler's flags.
    """
    found = [
        f"{name}={environ[name]} (from the environment)" for name in DEFAULTS if name in environ
    ]
    named = "--cache_dir" in environ.get(COMPILER, "")
    wanted = DEFAULTS if named else {**DEFAULTS, CACHE: str(cache.absolute())}
    for name, value in wanted.items():
        if name not in environ:
            environ[name] = value
            found.append(f"{name}={value}")
    return found


def compiles_only(environ: Mapping[str, str]) -> bool:
    """Return whether this run only collects graphs."""
    return environ.get(ONLY_COMPILE, "0").strip().lower() not in ("", "0", "false")
