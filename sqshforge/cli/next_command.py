"""The command that starts a job from a sqsh, for the user to type next."""

from __future__ import annotations

import shlex
from pathlib import Path

from sqshforge import recipe
from sqshforge.engine.buildah import OURS
from sqshforge.errors import SqshforgeError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.project import find
from sqshforge.squash import request


def launch(image: Path, programs: Programs) -> str:
    """Start a job out of a sqsh where a Slurm cluster answers, else a shell in it."""
    nodes = _nodes(programs)
    launcher = _launcher(image.absolute()) if nodes else None
    if launcher is None:
        return suggest.sqshforge("run", image, "--", "bash")
    job = shlex.join(["sbatch", f"--nodes={min(nodes, 2)}", suggest.shown(launcher)])
    return f"IMAGE={shlex.quote(suggest.shown(image))} {job}"


def _nodes(programs: Programs) -> int:
    """The nodes of the partition that a job goes to by itself; 0 where no cluster answers."""
    if programs.which("sbatch") is None or programs.which("sinfo") is None:
        return 0
    asked = programs.attempt(["sinfo", "--noheader", "--format=%P %D"], timeout=3)
    rows = [line.split() for line in asked.out.splitlines()] if asked.code == 0 else []
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0].endswith("*"))


def _launcher(image: Path) -> Path | None:
    """The launcher of this checkout that is made for what a sqsh was packed from, if one is."""
    facts = request.read(image)
    try:
        home = find()
        target = dict(request.image(facts).labels).get(OURS, "") if facts else ""
        names = recipe.find(target, home.recipes).launchers
    except SqshforgeError:
        return None
    return next((home.root / "launch" / f"{name}.sbatch" for name in names), None)
