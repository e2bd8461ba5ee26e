"""Takes the licence files out of the tars of git sources, while an image is built.

    python3 licenses.py --into /licenses nccl.tar gdrcopy.tar

Code compiled from a source gets into an image without a package that would bring its license files.
The files at the top of NAME.tar go to INTO/NAME/ under their own names.

Standard library only. Exit codes: 0 every tar has license files; 1 a tar has none or cannot be
read, or a file cannot be written. One line says what is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

NAMES = re.compile(
    r"(\./)?(?P<name>(LICEN[CS]E|COPYING|NOTICE|THIRD-?PARTY-?NOTICES)[\w.-]*)", re.IGNORECASE
)


class NoLicenseError(Exception):
    """A source has no license file."""


def take(tar: Path, into: Path) -> list[str]:
    """Extract the license files at the top of a source's tar into a folder; return their names.

    Raises `NoLicenseError` if there is none, and `OSError` or `tarfile.TarError` if the tar cannot
    be read.
    """
    taken = []
    with tarfile.open(tar, "r:") as source:
        for member in source:
            found = NAMES.fullmatch(member.name)
            content = source.extractfile(member) if found and member.isfile() else None
            if found is None or content is None:
                continue
            into.mkdir(parents=True, exist_ok=True)
            place = into / found["name"]
            place.write_bytes(content.read())
            place.chmod(0o644)
            taken.append(place.name)
    if not taken:
        raise NoLicenseError(
            "no licence file at its top (LICENSE, COPYING, NOTICE); fix: name a ref that has one"
        )
    return taken


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="licenses.py", description=__doc__.split("\n")[0])
    parser.add_argument("--into", type=Path, required=True, help="where a folder for each is made")
    parser.add_argument("tars", type=Path, nargs="+", help="NAME.tar")
    asked = parser.parse_args(arguments)
    for tar in asked.tars:
        try:
            print(f"{tar.stem}: {' '.join(sorted(take(tar, asked.into / tar.stem)))}")
        except (OSError, tarfile.TarError, NoLicenseError) as error:
            print(f"{parser.prog}: {tar}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
