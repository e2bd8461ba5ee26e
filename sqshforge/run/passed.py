"""The variables of the caller that go into every container and override the image's.

This is the only list of them, for all runtimes. Enroot clears all others; pyxis and the built-in
runtime pass them unless the image sets them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Passed(NamedTuple):
    """Names that go in for one reason; a * stands for any end of a name."""

    patterns: tuple[str, ...]
    why: str


# Never variables about the host's own files (PATH, HOME, TMPDIR, LD_LIBRARY_PATH, PYTHONPATH,
# CUDA_HOME), nor those that describe the image (PYTORCH_VERSION).
PASSED = (
    Passed(("SLURM_*", "SLURMD_NODENAME"), "the job, its nodes, the place of this one among them"),
    Passed(("PMI_*", "PMI2_*", "PMIX_*"), "process managers: how the ranks of MPI find each other"),
    Passed(("MASTER_*", "NODES", "RENDEZVOUS"), "where and how the nodes meet, their names"),
    Passed(
        ("CHECKPOINTS", "IMAGE", "REQUEUES", "RESTARTS", "SPARES", "SHRINK"),
        "the run, as its launcher started it",
    ),
    Passed(
        (
            *("INSTANCE_*", "NPROC_PER_NODE", "GPUS_PER_NODE", "NUMA_*"),
            *("PREFLIGHT", "PREFLIGHT_*", "REPLAY"),
        ),
        "what the user says of the nodes, where they would be looked at",
    ),
    Passed(("NSYS", "NSYS_*"), "what is profiled"),
    Passed(
        ("TRAINING_*", "CAUSAL_CONV1D_*", "MAMBA_*", "SM_CHANNEL_*"),
        "which operations are used and how they add up, where SMP's data lies",
    ),
    Passed(("NCCL_*", "FI_*", "OFI_*", "GLOO_*"), "networks: NCCL, libfabric and EFA, gloo"),
    Passed(("NEURON_*", "XLA_*"), "Neuron's runtime and compiler"),
    Passed(
        ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_*", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING"),
        "the GPUs that Slurm gives, and how CUDA uses them",
    ),
    Passed(("OMP_*", "MALLOC_*"), "threads of a process, and what memory it keeps"),
    Passed(
        ("TORCH*", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_*"),
        "torch, its compilers",
    ),
    Passed(
        ("HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "AWS_*"),
        "services: where they are, who asks, what is kept of them",
    ),
    Passed(
        tuple(
            name
            for one in ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
            for name in (one, one.upper())
        ),
        "the way to the network; programs differ in the case that they read",
    ),
    Passed(
        ("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        "whom to trust there; mount the file",
    ),
    Passed(("LANG", "LANGUAGE", "LC_*", "TZ"), "language and time of what is logged"),
)


def names(environment: Mapping[str, str]) -> list[str]:
    """The names in an environment that go in, sorted, without those that no shell can use."""
    patterns = [pattern for one in PASSED for pattern in one.patterns]
    return sorted(
        name
        for name in environment
        if is_name(name) and any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def is_name(name: str) -> bool:
    """Whether a shell can have a variable of this name."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def forget_coerced() -> None:
    """Remove the variable that Python added to this process's environment at its start.

    If the caller has set no locale, Python sets LC_CTYPE (PEP 538).
    """
    with contextlib.suppress(OSError):
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(one.startswith(b"LC_CTYPE=") for one in given):
            os.environ.pop("LC_CTYPE", None)
