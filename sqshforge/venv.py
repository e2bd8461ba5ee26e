"""Create virtual environments of a checkout with uv: setup.sh's packages, and their versions.

usage: python -m sqshforge.venv install FOLDER REQUIREMENT [OPTION ...]
       python -m sqshforge.venv lock

uv links packages that it has unpacked before into the environment, so one of gigabytes is recreated
in seconds; pip would download and unpack all of it. The exit code and the messages are uv's.

`lock` rewrites constraints/NAME.txt, a file for each goal of setup.sh: one version of every package
for each Python and every platform, without the address of any index.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sqshforge.errors import SqshforgeError
from sqshforge.host import files, temporary
from sqshforge.host.programs import Programs, Result, failed
from sqshforge.network import access

OLDEST_PYTHON = "3.10"
# Goals of setup.sh and their extras in pyproject.toml.
GOALS = {"quickstart": "", "test": "test", "torch22": "torch22", "composer": "composer"}
GOALS |= {"composer-image": "composer-image"}
OF_IMAGES = {"composer-image": "composer-mamba"}  # goals that use the versions of an image
# torch pins each of its own dependencies exactly, and its builds for CPUs have none of these.
OF_TORCH = ("cuda-", "nvidia-", "torch==", "triton==")


def install(
    folder: Path, requirement: str, programs: Programs, options: Sequence[str] = ()
) -> Result:
    """Install an editable requirement, such as `.[test]`, from where pip would get it."""
    words = ["--python", str(folder / "bin" / "python"), *options, "--editable", requirement]
    return _uv(["install", *words], access.pip(programs), programs)


def lock(root: Path, programs: Programs) -> None:
    """Write the constraints of each goal of setup.sh, resolved with pip's configured indexes.

    Raises `WorkError` with uv's message if an index lacks a package.
    """
    pip = replace(access.pip(programs).without_local_indexes(), find_links=())
    for goal, extra in GOALS.items():
        text = _resolved(root, goal, extra, pip, programs)
        files.publish(text.encode(), root / "constraints" / f"{goal}.txt")


def _resolved(root: Path, goal: str, extra: str, pip: access.Pip, programs: Programs) -> str:
    """Resolve a goal's constraints; goals in `OF_IMAGES` use the versions in an image's lock."""
    with temporary.folder("constraints") as folder:
        given = folder / "constraints.txt"
        given.write_text(_locked(root, OF_IMAGES[goal]) if goal in OF_IMAGES else "")
        words = ["compile", "--universal", "--python-version", OLDEST_PYTHON, "--upgrade"]
        words += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        words += ["--constraint", str(given), *(["--extra", extra] if extra else [])]
        done = _uv([*words, str(root / "pyproject.toml")], pip, programs)
    if done.code != 0:
        raise failed(done.argv, done.code, done.err.splitlines())
    lines = [one for one in done.out.splitlines() if not one.startswith(OF_TORCH)]
    return "".join(f"{one}\n" for one in lines)


def _locked(root: Path, target: str) -> str:
    """Return the versions of an image's packages from its lock, as constraints."""
    lock = json.loads((root / "recipes" / "locks" / f"{target}.lock").read_text())
    packages = [*lock["python"]["packages"], *lock["python"]["built"]]
    return "".join(f"{one['name']}=={one['version']}\n" for one in packages)


def _uv(words: Sequence[str], pip: access.Pip, programs: Programs) -> Result:
    argv = [sys.executable, "-m", "uv", "pip", *words[:1], "--quiet", *pip.for_uv(), *words[1:]]
    return programs.attempt(argv, env=access.uv_environment(pip))


def main() -> int:
    try:
        match sys.argv[1:]:
            case ["install", folder, requirement, *options]:
                done = install(Path(folder), requirement, Programs(), options)
                sys.stderr.write(done.err)
                return done.code
            case ["lock"]:
                lock(Path.cwd(), Programs())
                return 0
    except SqshforgeError as error:
        sys.stderr.write("".join(f"{line}\n" for line in error.lines()))
        return error.exit_code
    sys.stderr.write(__doc__ or "")
    return 2


if __name__ == "__main__":
    sys.exit(main())
