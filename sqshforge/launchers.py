"""Write launch/*.sbatch from their templates in launch/template: `make launchers`.

A launcher must be self-contained, so their common part is a template that each of them extends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jinja2

from sqshforge import project
from sqshforge.host.files import publish
from sqshforge.run.passed import PASSED

TEMPLATES = "launch/template"
SUFFIX = ".sbatch.j2"
BASE = "launcher"  # the template that the others extend
# Variables that win over the image's: what the launcher decides, and settings for the node's part
# of a job (training.launch).
WINNERS = (
    *("CHECKPOINTS", "IMAGE", "LAUNCHED_AT", "NODES"),
    *("REQUEUES", "RESTARTS", "SPARES", "SHRINK", "MASTER_*"),
    *("INSTANCE_TYPE", "NPROC_PER_NODE", "GPUS_PER_NODE", "NUMA_*", "RENDEZVOUS"),
    *("PREFLIGHT", "PREFLIGHT_*", "REPLAY"),
    *("NSYS", "NSYS_*"),
    *("OMP_*", "TRITON_*", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_*", "FI_*", "GLOO_*", "NEURON_*"),
)


def names(root: Path) -> list[str]:
    """Return the names of the launchers that have a template."""
    found = (path.name.removesuffix(SUFFIX) for path in (root / TEMPLATES).glob(f"*{SUFFIX}"))
    return sorted(name for name in found if name != BASE)


def render(root: Path, name: str) -> str:
    """Return a launcher's text."""
    environment = jinja2.Environment(
        # The code that keeps enroot's root to the end is shared with `sqshforge run`.
        loader=jinja2.FileSystemLoader([root / TEMPLATES, root / "sqshforge" / "run"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # The default delimiters would take the shell's ${#array[@]} for a comment.
        comment_start_string="<#",
        comment_end_string="#>",
    )
    template = environment.get_template(f"{name}{SUFFIX}")
    return template.render(
        name=name,
        winners=[_expression(pattern) for pattern in WINNERS],
        passed=[_expression(pattern) for one in PASSED for pattern in one.patterns],
    )


def _expression(pattern: str) -> str:
    """Turn a pattern of names into a regular expression for grep."""
    return pattern.replace("*", ".*")


def main(root: Path) -> None:
    """Write all launchers."""
    for name in names(root):
        publish(render(root, name).encode(), root / "launch" / f"{name}.sbatch")


if __name__ == "__main__":
    main(project.find().root)
    sys.exit()
