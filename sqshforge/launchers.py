"""Write launch/*.sbatch from their templates in launch/template: `make launchers`.

A launcher must stand alone, so what all of them share is one template that each extends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jinja2

from sqshforge import project
from sqshforge.run.passed import PASSED

TEMPLATES = "launch/template"
SUFFIX = ".sbatch.j2"
BASE = "launcher"  # the template that the others extend
# What wins over a variable of the image: what the launcher decides, and settings of the node's
# part of a job (training.launch).
WINNERS = (
    *("CHECKPOINTS", "IMAGE", "LAUNCHED_AT", "NODES"),
    *("REQUEUES", "RESTARTS", "SPARES", "SHRINK", "MASTER_*"),
    *("INSTANCE_TYPE", "NPROC_PER_NODE", "GPUS_PER_NODE", "NUMA_*", "RENDEZVOUS"),
    *("PREFLIGHT", "PREFLIGHT_*", "REPLAY"),
    *("NSYS", "NSYS_*"),
    *("OMP_*", "TRITON_*", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_*", "FI_*", "GLOO_*", "NEURON_*"),
)


def names(root: Path) -> list[str]:
    """The launchers that have a template."""
    found = (path.name.removesuffix(SUFFIX) for path in (root / TEMPLATES).glob(f"*{SUFFIX}"))
    return sorted(name for name in found if name != BASE)


def render(root: Path, name: str) -> str:
    """A launcher's text."""
    environment = jinja2.Environment(
        # What keeps enroot's root to the end is the same for `sqshforge run`.
        loader=jinja2.FileSystemLoader([root / TEMPLATES, root / "sqshforge" / "run"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Of the shell's ${#array[@]} the usual ones would make a comment.
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
    """A pattern of names as grep reads it."""
    return pattern.replace("*", ".*")


def main(root: Path) -> None:
    """Write all of them."""
    for name in names(root):
        path = root / "launch" / f"{name}.sbatch"
        path.write_text(render(root, name), encoding="utf-8")
        path.chmod(0o644)


if __name__ == "__main__":
    main(project.find().root)
    sys.exit()
