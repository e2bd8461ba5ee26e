"""A checkout on a machine whose programs and package managers are stand-ins, for setup.sh.

Its Python copies pip into an environment, because ensurepip would take seconds to install and
compile it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
SHELL = (
    "sh dirname id cksum cat stat find rm mv mkdir mktemp ls grep sleep tail head flock env touch "
    "ln basename chmod cp"
)
ALL = ["buildah", "mksquashfs", "mmdebstrap", "newuidmap", "squashfuse", "fuse-overlayfs"]
BRINGS = {"squashfs-tools": "mksquashfs", "uidmap": "newuidmap"}
PYPROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
[project.optional-dependencies]
test = []
"""
# Reports that it has begun, and goes on once nothing holds it.
BACKEND = """import base64, hashlib, time, zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    Path("begun").touch()
    while Path("hold").exists():
        time.sleep(0.05)
    files = {"tiny.pth": str(Path.cwd()), "tiny-1.dist-info/METADATA": "Metadata-Version: 2.1\\n"
             "Name: tiny\\nVersion: 1\\n", "tiny-1.dist-info/WHEEL": "Wheel-Version: 1.0\\n"
             "Generator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    rows = "".join(f"{name},,\\n" for name in files) + "tiny-1.dist-info/RECORD,,\\n"
    with zipfile.ZipFile(Path(folder, "tiny-1-py3-none-any.whl"), "w") as wheel:
        for name, text in {**files, "tiny-1.dist-info/RECORD": rows}.items():
            wheel.writestr(name, text)
    return "tiny-1-py3-none-any.whl"
"""
# Installs packages of its index, as a link to each program that a package contains.
APT = """#!/bin/sh
echo "$(basename "$0") $*" >> {place}/calls
case " $* " in
*" update "*) if [ -e {place}/locked ]; then rm {place}/locked
    echo 'E: Could not get lock /var/lib/apt/lists/lock.' >&2; exit 100; fi ;;
*" install "*) for one in "$@"; do case $one in {brings}
    esac; done ;;
*" show "*) case " {index} " in *" $2 "*) ;; *) exit 100 ;; esac ;;
esac
"""
# The environment is the last word of `python3 -m venv --clear FOLDER`.
PYTHON = """#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec /usr/bin/python3 "$@"; fi
/usr/bin/python3 "$@" --without-pip || exit
for folder; do :; done
cp -Rp {whole}/lib "$folder/" && cd "$folder/bin" || exit
for name in pip pip3; do
    cat >$name <<END # as pip writes it where a path has a blank
#!/bin/sh
'''exec' "$PWD/python3" "\\$0" "\\$@"
' '''
from pip._internal.cli.main import main
main()
END
    chmod 755 $name
done
"""


@functools.cache
def whole_environment() -> Path:
    """Return an environment filled by ensurepip, without setuptools, which nothing here needs."""
    folder = Path(tempfile.mkdtemp(prefix="sqshforge-test-venv-"))
    atexit.register(shutil.rmtree, folder)
    folder.chmod(0o755)
    subprocess.run(["/usr/bin/python3", "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    return folder


@dataclass(frozen=True)
class Machine:
    """A checkout with a PATH of its own."""

    place: Path
    name: str = "checkout"

    @property
    def checkout(self) -> Path:
        return self.place / self.name

    @property
    def tools(self) -> Path:
        return self.place / "tools"

    def has(self, *programs: str) -> None:
        for name in programs:
            self.has_program(name, "#!/bin/sh\nexit 0\n")

    def has_program(self, name: str, text: str) -> None:
        """Install a stand-in, which may replace a shell tool's link to this machine's own."""
        (self.tools / name).unlink(missing_ok=True)
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def has_apt(self, index: Sequence[str]) -> None:
        """Install an apt-get with these packages in its index."""
        brings = "\n".join(
            f"    {one}) printf '#!/bin/sh\\n' > {self.tools}/{BRINGS.get(one, one)}; "
            f"chmod 755 {self.tools}/{BRINGS.get(one, one)} ;;"
            for one in index
        )
        text = APT.format(place=self.place, brings=brings, index=" ".join(index))
        for name in ("apt-get", "apt-cache", "dpkg"):
            self.has_program(name, text)

    def has_sudo(self) -> None:
        """Install a sudo that records its use. It needs no rights, as the stand-ins need none."""
        text = f'#!/bin/sh\necho "sudo $*" >> {self.place}/calls\nexec "$@"\n'
        self.has_program("sudo", text)

    def calls(self) -> list[str]:
        return (self.place / "calls").read_text().splitlines()

    def argv(self, *, user: bool, before: str = ":", goal: str = "quickstart") -> list[str]:
        argv = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh"]
        words = ["env", "-i", f"PATH={self.tools}", f"HOME={self.place}", "./setup.sh"]
        return [*argv, *(USER if user else ()), *words, goal]

    def run(
        self,
        *,
        user: bool = False,
        system: str = "debian",
        before: str = ":",
        goal: str = "quickstart",
    ) -> subprocess.CompletedProcess[str]:
        (self.place / "os-release").write_text(f"ID={system}\n")
        mount = f"mount --bind {self.place}/os-release /etc/os-release"
        return subprocess.run(
            self.argv(user=user, before=f"{mount} && {before}", goal=goal),
            cwd=self.checkout,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    @property
    def is_set_up(self) -> bool:
        python = self.checkout / ".venv/bin/python"
        code = "import importlib.metadata as m; print(m.version('tiny'))"
        made = (self.checkout / ".venv/made-for-quickstart").exists()
        if not made:
            return False
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout == "1\n"


@pytest.fixture
def machine(as_root: None) -> Iterator[Machine]:
    """A user's checkout, with only a shell's tools and Python on the PATH."""
    place = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    try:
        made = Machine(place)
        made.checkout.mkdir()
        made.tools.mkdir()
        shutil.copy(ROOT / "setup.sh", made.checkout)
        (made.checkout / "pyproject.toml").write_text(PYPROJECT)
        (made.checkout / "backend.py").write_text(BACKEND)
        for name in SHELL.split():
            (made.tools / name).symlink_to(shutil.which(name) or "/none")
        made.has_program("python3", PYTHON.format(whole=whole_environment()))
        for path in (place, *place.rglob("*")):
            os.lchown(path, 65534, 65534)
        place.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(place)
