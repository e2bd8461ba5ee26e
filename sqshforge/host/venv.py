"""Fill a virtual environment by uv, as setup.sh does: `python -m sqshforge.host.venv FOLDER WHAT`.

uv links what it has unpacked before into the environment, so one of gigabytes is made again in
seconds; pip would get and unpack all of it. The exit code is uv's, and so is what it says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sqshforge.host import network
from sqshforge.host.programs import Programs, Result


def install(folder: Path, requirement: str, programs: Programs) -> Result:
    """Install an editable requirement, such as `.[test]`, from where pip would get it."""
    pip = network.pip(programs)
    argv = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    argv += ["--python", str(folder / "bin" / "python"), *pip.for_uv(), "--editable", requirement]
    ca = network.ca_bundle(pip)
    return programs.attempt(argv, env={"SSL_CERT_FILE": str(ca)} if ca else {})


if __name__ == "__main__":
    folder, requirement = sys.argv[1:]
    done = install(Path(folder), requirement, Programs())
    sys.stderr.write(done.err)
    sys.exit(done.code)
