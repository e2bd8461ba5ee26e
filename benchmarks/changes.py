"""The changes that another build makes to an image's tree, for benchmarks.delta.

Each function changes the given tree in place and returns a description of the change.
"""

from __future__ import annotations

import argparse
import csv
import os
import py_compile
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.hot import HotList
from sqshforge.image.enroot import ImageConfig
from tests.support import tiny_root

PACKAGE, TORCH = "pyyaml==6.0.2", ("torch==2.9.0", "torch==2.9.1")
PLATFORM = "manylinux_2_28_aarch64"  # of torch
LATER = 86_400  # seconds between the two builds


def small(tree: Path) -> HotList:
    """Create a tree with this machine's shell, packages and training code; half of it is hot."""
    tiny_root.tree(tree, ImageConfig(reference="small"))
    site = tree / "usr/local/lib/python3.11/dist-packages"
    chance = random.Random(1)
    for name in ("first", "torch", "yaml"):
        (site / name).mkdir(parents=True)
        for index in range(20):
            (site / name / f"{index:02}.py").write_bytes(chance.randbytes(20_000))
    (tree / "sqshforge/training").mkdir(parents=True)
    (tree / "sqshforge/training/cli.py").write_text("VALUE = 1\n")
    return HotList.of(f"usr/local/lib/python3.11/dist-packages/torch/{n:02}.py" for n in range(20))


def edit(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Add a line to a module, and compile it."""
    module = tree / "sqshforge/training/cli.py"
    module.write_text(module.read_text() + "EDITED = True\n")
    py_compile.compile(
        str(module), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    for record in tree.glob("sqshforge/meta/provenance.json"):  # of another build, another time
        record.write_text(record.read_text().replace('"created": "', '"created": "1'))
    return "one more line in training/cli.py"


def package(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Replace one package."""
    return made_up(tree, "yaml") if given.small else replaced(tree, given.package, programs)


def torch(tree: Path, given: argparse.Namespace, programs: Programs) -> str:
    """Replace torch."""
    if given.small:
        return made_up(tree, "torch")
    replaced(tree, given.torch[1], programs, PLATFORM)
    return f"{given.torch[0]} to {given.torch[1].partition('==')[2]}, for Arm".replace("==", " ")


def made_up(tree: Path, name: str) -> str:
    """Replace a file of a package in the small run's tree, and return a description."""
    site = site_of(tree)
    (site / name / "00.py").write_bytes(random.Random(2).randbytes(20_100))
    later(site)
    return f"{name}, made up"


def replaced(tree: Path, wanted: str, programs: Programs, platform: str = "") -> str:
    """Replace a package of a tree by another version, and give all of its packages a later time."""
    site = site_of(tree)
    name, version = name_of(wanted), wanted.partition("==")[2]
    before = removed(site, name)
    added = tree.with_name(f"{tree.name}-added")
    argv: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    argv += ["--no-compile", "--disable-pip-version-check", "--root-user-action=ignore"]
    argv += ["--platform", platform, "--only-binary=:all:"] if platform else []
    programs.capture([*argv, "--target", added, wanted])
    shutil.rmtree(added / "bin", ignore_errors=True)
    argv = [sys.executable, "-m", "compileall", "-qq", "-s", added]
    argv += ["-p", f"/{site.relative_to(tree)}", "--invalidation-mode", "unchecked-hash", added]
    programs.attempt(argv)  # as in a build, a few files for other Pythons fail to compile
    shutil.copytree(added, site, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(added)
    later(site)
    return f"{name} {before} to {version}"


def site_of(tree: Path) -> Path:
    """Return the folder of a tree's packages."""
    where = "usr/local/lib/python3*/dist-packages"
    for found in tree.glob(where):
        return found
    raise RequestError(f"--file: the image has no folder {where}", fix="name one of cpu-mamba")


def name_of(wanted: str) -> str:
    """Return the name in NAME==VERSION as indexes compare it, with - for _ and in lower case."""
    return re.sub(r"[-_.]+", "-", wanted.partition("==")[0].strip()).lower()


def facts_of(site: Path, name: str) -> Path:
    """Return the .dist-info folder of a package; raises `RequestError` if it is not installed."""
    for one in site.glob("*.dist-info"):
        if name_of(one.name.partition("-")[0]) == name:
            return one
    raise RequestError(
        f"the image has no package {name} to replace by another version",
        fix="--package NAME==VERSION of one that is in its recipe's lock file",
    )


def later(site: Path) -> None:
    """Give all packages the modification time of a later build."""
    for path in [site, *site.rglob("*")]:
        time = path.lstat().st_mtime + LATER
        os.utime(path, (time, time), follow_symlinks=False)


def removed(site: Path, name: str) -> str:
    """Remove the files that a package's RECORD lists; returns its version."""
    facts = facts_of(site, name)
    with (facts / "RECORD").open(newline="") as file:
        paths = [site / row[0] for row in csv.reader(file)]
    for path in paths:
        for one in (path, *path.parent.glob(f"__pycache__/{path.stem}.*.pyc")):
            if one.is_relative_to(site):
                one.unlink(missing_ok=True)
    return facts.name.removesuffix(".dist-info").partition("-")[2]


CHANGES: Mapping[str, Callable[[Path, argparse.Namespace, Programs], str]] = {
    "edit": edit,
    "package": package,
    "torch": torch,
}
