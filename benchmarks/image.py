"""The image used to measure packing: cpu-mamba plus real packages, in a docker daemon.

Everything below /sqshforge takes minutes to build, so it is kept as an archive; what the project
puts on top (its record, launchers and training code) is built anew each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sqshforge import lock, recipe
from sqshforge.build import build, dockerfile
from sqshforge.build.context import Context
from sqshforge.engine import Build
from sqshforge.engine.docker import Docker
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter

TARGET = "cpu-mamba"
BASE = "localhost/sqshforge-bench-base:latest"
NAME = "localhost/sqshforge-bench:latest"
EDITED = "localhost/sqshforge-bench:edited"
# Real files of all kinds; with them the image has 2.0 GB in 66,000 entries.
PACKAGES = (
    "botocore==1.44.5",
    "django==5.2.19",
    "matplotlib==3.11.2",
    "pandas==3.1.1",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "transformers==5.23.0",
)
DOCKERFILE = """\
FROM {image}
RUN --mount=type=bind,source=packages,target=/run/packages \\
    cd /usr/local/lib/python{python}/dist-packages && cp -r /run/packages/. . \\
    && {{ ls /run/packages | xargs python{python} -m compileall -qq -j 0 -x /tests/ \\
        --invalidation-mode unchecked-hash || [ "$?" -eq 123 ]; }}
"""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Builds the image in the daemon of DOCKER_HOST, and its last layers as often as asked."""

    context: Context
    folder: Path
    programs: Programs

    def build(self, name: str, edits: int = 0) -> str:
        """Build the last layers under a name; returns the image's ID, which differs for each edit.

        An edit is a different file in training/. It grows with each edit, because BuildKit treats a
        file with the same size and time as unchanged.
        """
        files = dict(self.context.files)
        if edits:
            files["payload/training/edited.py"] = b"# an edit\n" * edits
        replace(self.context, files=files).write(self.folder)
        docker = _docker(self.programs)
        docker.build(Build(context=self.folder, name=name), _unheard)
        built = docker.image(name)
        assert built is not None
        return built.id


def prepare(
    root: Path, folder: Path, programs: Programs, reporter: Reporter, *, small: bool
) -> Bench:
    """Load the base into the daemon, from its archive if there is one, else by building it."""
    what = recipe.find(TARGET, root / "recipes")
    context = dockerfile.context(what, lock.load(what, root / "recipes"), root, {})
    # WORKDIR creates /sqshforge: it and everything after it are what an image has on top.
    below, mark, above = context.files["Dockerfile"].decode().partition("WORKDIR /sqshforge")
    assert mark, "the Dockerfile has no WORKDIR /sqshforge"
    kind = "small" if small else "full"
    facts = [below, context.files["requirements/packages.txt"].decode(), DOCKERFILE, *PACKAGES]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    archive = root / "build" / "bench" / f"{kind}-{digest}.tar"
    if archive.is_file():
        reporter.say(f"base: loading {archive.relative_to(root)}")
        programs.capture([_docker(programs).client, "load", "--quiet", "--input", archive])
    else:
        reporter.say("base: building it (kept for the next time)")
        _make(root, folder, below, programs, reporter, small=small)
        _save(archive, programs)
    # The layers on top copy our code from this stage.
    _, stage, code = below.partition("FROM system AS code")
    code = stage + code.partition("FROM system AS image")[0]
    assert code, "the Dockerfile has no stage `code`"
    top = f"FROM {BASE} AS system\n{code}FROM {BASE}\n{mark}{above}"
    files = {**context.files, "Dockerfile": top.encode()}
    return Bench(
        context=replace(context, files=files), folder=folder / "context", programs=programs
    )


def _make(
    root: Path, folder: Path, below: str, programs: Programs, reporter: Reporter, *, small: bool
) -> None:
    """Build the project's own target up to /sqshforge, and add packages on top of it.

    `below` is the part of its Dockerfile up to there.
    """
    checkout = folder / "checkout"
    for name in ("recipes", "images", "launch", "patches", "training"):
        shutil.copytree(root / name, checkout / name)
    shutil.copy(root / "LICENSE", checkout)
    (checkout / "build").mkdir()
    for name in ("bases", "vendor"):  # downloads that other builds use too
        (root / "build" / name).mkdir(parents=True, exist_ok=True)
        (checkout / "build" / name).symlink_to(root / "build" / name)
    template = checkout / "images" / f"{TARGET}.Dockerfile.j2"
    template.write_text(below.partition("FROM system AS image")[0] if small else below)
    what = recipe.find(TARGET, checkout / "recipes")
    locked = lock.load(what, checkout / "recipes")
    made = build.build(what, locked, _docker(programs), checkout, programs, reporter)
    if small:
        programs.capture([_docker(programs).client, "tag", made.name, BASE])
    else:
        _add_packages(made.name, what.python.version, folder / "more", programs, reporter)
    shutil.rmtree(checkout)


def _add_packages(
    image: str, python: str, folder: Path, programs: Programs, reporter: Reporter
) -> None:
    # This machine's pip knows which index to use; none of its configuration gets into the image.
    argv: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    argv += ["--no-compile", "--only-binary", ":all:", "--python-version", python]
    for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        argv += ["--platform", f"{tag}_{os.uname().machine}"]
    programs.capture([*argv, "--target", folder / "packages", *PACKAGES])
    (folder / "Dockerfile").write_text(DOCKERFILE.format(image=image, python=python))
    with reporter.track("packages") as tracker:
        _docker(programs).build(Build(context=folder, name=BASE), tracker.note)
    shutil.rmtree(folder)


def _save(archive: Path, programs: Programs) -> None:
    """Save the base as an archive, and remove older archives of its kind."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    for old in archive.parent.glob(f"{archive.name.partition('-')[0]}-*.tar"):
        old.unlink()
    partial = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        programs.capture([_docker(programs).client, "save", "--output", partial, BASE])
        partial.rename(archive)
    finally:
        partial.unlink(missing_ok=True)


def _docker(programs: Programs) -> Docker:
    return Docker.connect(programs)


def _unheard(line: str) -> None:
    """Discard the output of a short build; its error carries the last lines."""
