"""The built-in runtime as one file for Python, which an image carries beside its launchers.

Nodes without sqshforge start the image with it: python3 sqshforge-run.pyz FILE.sqsh -- COMMAND.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

NAME = "sqshforge-run.pyz"
RUN = (
    *("__init__", "account", "container", "enroot", "gpu_driver", "mounts", "pairs", "passed"),
    *("standalone", "start", "supervisor", "warm"),
)
# The modules that sqshforge.run.standalone imports; otherwise it uses only the standard library.
MODULES = (
    "__init__.py",
    "errors.py",
    "platforms.py",
    *(f"host/{name}.py" for name in ("__init__", "cgroups", "programs", "rootpath", "suggest")),
    *("host/streams.py", "host/syscalls.py"),
    *(f"run/{name}.py" for name in RUN),
    "run/enroot.conf",
    *("squashfs/__init__.py", "squashfs/hot_note.py"),
)
SHEBANG = b"#!/usr/bin/env python3\n"
TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can hold
# Python 3.6 can parse it, so an old interpreter prints a message and does not fail otherwise.
MAIN = b"""\
import sys

if sys.version_info < (3, 9):
    sys.stderr.write(
        "error: sqshforge's runtime needs Python 3.9 or later; %s is %d.%d\\n"
        "  fix:   put a newer python3 first on the PATH of every node\\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(3)

from sqshforge.run.standalone import main

main(sys.argv[1:])
"""


def runtime() -> bytes:
    """The zip application, made from this package; equal sources give equal bytes."""
    package = Path(__file__).parents[1]
    paths = [path for pattern in MODULES for path in package.glob(pattern)]
    files = {f"sqshforge/{path.relative_to(package)}": path.read_bytes() for path in paths}
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    # Not compressed: the image does that, and releases of zlib give different bytes.
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted({**files, "__main__.py": MAIN}.items()):
            entry = zipfile.ZipInfo(name, TIME)
            entry.create_system = 3  # Unix, whatever this runs on
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return buffer.getvalue()
