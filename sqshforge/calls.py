"""Commands for the user to type next: each runs as it stands, from the folder they are in."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from sqshforge.engine.buildah import OURS
from sqshforge.errors import SqshforgeError
from sqshforge.programs import Programs
from sqshforge.project import Project, find


def sqshforge(*words: str | Path) -> str:
    """A call of this very program."""
    return shlex.join([*_program(), *map(shown, words)])


def make(project: Project, target: str, **variables: str) -> str:
    """A call of the checkout's Makefile."""
    here = [] if Path.cwd() == project.root else ["-C", shown(project.root)]
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join(["make", *here, target, *settings])


def python(*words: str | Path) -> str:
    """A call of the Python that has this package."""
    return shlex.join([shown(Path(sys.executable)), *map(shown, words)])


def launch(image: Path, programs: Programs) -> str:
    """Start a job out of a sqsh where a Slurm cluster answers, else a shell in it."""
    nodes = _nodes(programs)
    launcher = _launcher(image.absolute()) if nodes else None
    if launcher is None:
        return sqshforge("run", image, "--", "bash")
    job = shlex.join(["sbatch", f"--nodes={min(nodes, 2)}", shown(launcher)])
    return f"IMAGE={shlex.quote(shown(image))} {job}"


def shown(word: str | Path) -> str:
    """A path as it is reached from the current folder; any other word as it is."""
    if not isinstance(word, Path) or not word.is_absolute():
        return str(word)
    here = Path.cwd()
    return str(word.relative_to(here)) if word.is_relative_to(here) else str(word)


def _nodes(programs: Programs) -> int:
    """The nodes of the partition that a job goes to by itself; 0 where no cluster answers."""
    if programs.which("sbatch") is None or programs.which("sinfo") is None:
        return 0
    asked = programs.attempt(["sinfo", "--noheader", "--format=%P %D"], timeout=3)
    rows = [line.split() for line in asked.out.splitlines()] if asked.code == 0 else []
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0].endswith("*"))


def _launcher(image: Path) -> Path | None:
    """The launcher of this checkout that is made for what a sqsh was packed from, if one is."""
    from sqshforge import recipe, record  # which the doctor does without

    facts = record.read(image)
    try:
        home = find()
        target = dict(record.image(facts).labels).get(OURS, "") if facts else ""
        names = recipe.find(target, home.recipes).launchers
    except SqshforgeError:
        return None
    return next((home.root / "launch" / f"{name}.sbatch" for name in names), None)


def _program() -> list[str]:
    """How this program was called: by the name that the PATH has, else by its place."""
    called = Path(sys.argv[0])
    if called.name != "sqshforge":  # `python -m sqshforge`
        return [shown(Path(sys.executable)), "-m", "sqshforge"]
    found = shutil.which("sqshforge")
    if found is not None and Path(found).samefile(called):
        return ["sqshforge"]
    return [shown(called.absolute())]
