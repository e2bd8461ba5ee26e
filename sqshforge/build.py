"""Build a target's image: context, base, engine; nothing where nothing changed."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge import base, epoch, lock, machine, render
from sqshforge.disk import require_space
from sqshforge.engine import Build, Engine, Image
from sqshforge.errors import WorkError
from sqshforge.lockfile import alone
from sqshforge.programs import Programs
from sqshforge.progress import Reporter
from sqshforge.recipe import Recipe

INPUTS = "io.sqshforge.inputs"  # a label: digest of all that an image was built from


@dataclass(frozen=True, kw_only=True)
class Built:
    """A target's image in its engine."""

    name: str
    image: Image
    source: str
    seconds: float
    up_to_date: bool


def name_of(target: str) -> str:
    """The name that a target's image has in every engine."""
    return f"localhost/sqshforge-{target}:latest"


def build(
    recipe: Recipe, engine: Engine, root: Path, programs: Programs, reporter: Reporter
) -> Built:
    """Build a recipe's image with an engine, from the checkout at `root`.

    Raises `RequestError` for a lock or template that does not fit, `MissingError` where the disk
    is too small or something is not there, `WorkError` where the build fails.
    """
    started = time.monotonic()
    output = root / "build"
    locked = lock.load(recipe, root / "recipes")
    name = name_of(recipe.target)
    output.mkdir(exist_ok=True)
    busy = f"waiting for another build of {recipe.target}"
    with alone(output / f".{recipe.target}.lock", busy, reporter):
        context = render.context(recipe, locked, root)
        made_at = epoch.asked()
        inputs = context.digest() if made_at is None else f"{context.digest()} at {made_at}"
        image = engine.image(name)
        up_to_date = image is not None and image.labels.get(INPUTS) == inputs
        if not up_to_date:
            require_space(engine.storage(), int(recipe.disk_gb * 1e9), f"building {recipe.target}")
            foundation = base.prepare(recipe, locked, engine, output / "bases", programs, reporter)
            pip = machine.pip(programs)
            wheels = (
                installer(locked, output / "wheels", programs),
                *machine.local_wheels(pip, locked.sums()),
            )
            folder = output / recipe.target / "context"
            render.write(render.Context(files=context.files, wheels=wheels), folder)
            place = output / recipe.target / "secrets"
            with (
                _secrets(pip, place) as secrets,
                reporter.track(f"build {recipe.target}") as tracker,
            ):
                request = Build(
                    context=folder,
                    name=name,
                    epoch=made_at,
                    args={
                        "BASE": foundation,
                        "INPUTS": inputs,
                        **machine.proxies(),
                    },
                    secrets=secrets,
                )
                try:
                    engine.build(request, tracker.note)
                except WorkError as error:
                    raise WorkError(error.what, where=error.where, mend=mend(error.what)) from None
            image = engine.image(name)
    if image is None:
        raise WorkError(f"{engine.name} built {name} and does not have it", where=engine.name)
    return Built(
        name=name,
        image=image,
        source=engine.source(name),
        seconds=time.monotonic() - started,
        up_to_date=up_to_date,
    )


def mend(said: str) -> str:
    """What helps against a build's failure, where its words tell; empty elsewhere."""
    absent = re.search(r"No matching distribution found for (\S+)", said)
    if absent is None:
        return ""
    return (
        f"pip on this machine does not find {absent[1]}: a CPU build of torch needs PyTorch's own "
        "index in PIP_EXTRA_INDEX_URL or a folder in PIP_FIND_LINKS (docs/machines.md)"
    )


def installer(locked: lock.Lock, folder: Path, programs: Programs) -> Path:
    """Pip's own wheel by the lock's hash, fetched once by the pip of this machine."""
    wheel = folder / locked.python.installer_wheel()
    sums = locked.python.installer.hashes
    if not (wheel.is_file() and f"sha256:{machine.sha256(wheel)}" in sums):
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "installer.txt"
        wanted.write_text(locked.python.installer.requirement())
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        argv += ["--require-hashes", "--only-binary", ":all:"]
        programs.capture([*argv, "--dest", folder, "--requirement", wanted])
    return wheel


@contextlib.contextmanager
def _secrets(pip: machine.Pip, folder: Path) -> Iterator[dict[str, Path]]:
    """The machine's own settings as files that a build sees and an image never keeps.

    They lie in a private folder that is gone afterwards; if a build was killed, the next one
    removes them.
    """
    ca = machine.ca_bundle(pip)
    contents = {
        "pip": pip.remote().encode(),
        "apt": b'Acquire::https::CaInfo "/run/secrets/ca";\n' if ca else b"",
        "ca": ca.read_bytes() if ca else b"",
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        yield {name: folder / name for name in contents}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
