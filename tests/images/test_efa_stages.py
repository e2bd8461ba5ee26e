"""The stages of cuda13-mamba that bring EFA and GDRCopy, really built.

Their hosts are not asked: a stand-in for EFA's installer lays out what the real one does, and takes
only the flags that are meant; one for GDRCopy has the same rule of make. Of the Python packages
only CUDA's runtime is real, which the plugin looks for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import checkouts, engines

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]

TARGET = "efa-stages"
INSTALLER = """\
#!/bin/bash
# What EFA's installer 1.48.0 leaves on Debian, as far as an image looks at it.
set -e
test "$*" = "-y -g --skip-kmod --no-verify --skip-limit-conf"
apt-cache show tcl >/dev/null
mkdir -p /opt/amazon/efa/{bin,lib} /opt/amazon/openmpi/{bin,lib} /opt/amazon/ofi-nccl/lib
echo "# EFA installer version: 1.48.0" >/opt/amazon/efa_installed_packages
echo "NET/OFI Initializing aws-ofi-nccl 1.19.0" >/opt/amazon/ofi-nccl/lib/libnccl-net.so
echo /opt/amazon/ofi-nccl/lib >/etc/ld.so.conf.d/100_ofinccl.conf
"""
MAKEFILE = """\
lib_install:
\tmkdir -p $(prefix)/lib
\techo 'int gdr_open(void) { return 0; }' >gdrapi.c
\t$(CC) -shared -fPIC -Wl,-soname,libgdrapi.so.2 -o $(prefix)/lib/libgdrapi.so.2.5 gdrapi.c
\tln -s libgdrapi.so.2.5 $(prefix)/lib/libgdrapi.so.2
\tln -s libgdrapi.so.2 $(prefix)/lib/libgdrapi.so
"""
LOOK = """
import ctypes, json, os
from pathlib import Path
from training.job.machine.software import look_at_software
for name in ("libcudart.so", "libgdrapi.so"):
    ctypes.CDLL(name)
found = look_at_software(Path("/"), os.environ)
print(json.dumps({"plugin": found.plugin, "installer": found.installer}))
"""


def gdrcopy(folder: Path) -> str:
    """A git repository in the place of GDRCopy's; its address."""
    place = folder / "gdrcopy"
    place.mkdir()
    (place / "Makefile").write_text(MAKEFILE)
    (place / "LICENSE").write_text("MIT\n")
    git = ["git", "-C", str(place), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v2.5.2"]):
        subprocess.run([*git, *words], check=True)
    return f"file://{place}"


def installer(folder: Path) -> str:
    """An archive in the place of EFA's installer; its address."""
    source, place = folder / "aws-efa-installer", folder / "aws-efa-installer-1.48.0.tar.gz"
    source.mkdir()
    (source / "efa_installer.sh").write_text(INSTALLER)
    (source / "efa_installer.sh").chmod(0o755)
    with tarfile.open(place, "w:gz") as made:
        made.add(source, source.name)
    return f"file://{place}"


def recipe(root: Path, folder: Path) -> None:
    """The real target's system, without torch and what is compiled against it."""
    data = yaml.safe_load((root / "recipes" / "cuda13-mamba.yaml").read_text())
    runtime = next(one for one in data["python"]["builders"] if "cuda-runtime" in one)
    yml = next(one for one in data["python"]["packages"] if "pyyaml" in one)
    data |= {"target": TARGET, "template": "cuda13-mamba", "patches": {}, "launchers": []}
    data["python"] |= {"packages": [yml, runtime], "built": [], "builders": [runtime]}
    data["sources"]["gdrcopy"] = {"git": gdrcopy(folder), "ref": "v2.5.2", "license": "MIT"}
    data["archives"]["efa"] = {"url": installer(folder)}
    data |= {"smoke": {}, "disk_gb": 3.0}
    (root / "recipes" / f"{TARGET}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))


def run(root: Path, *words: str | Path) -> str:
    done = subprocess.run(
        words,
        cwd=root,
        env={**os.environ, "ENGINE": "buildah"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sqsh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("efa")
    root = checkouts.copy(folder / "checkout")
    recipe(root, folder)
    (folder / "engine").mkdir()
    command = (sys.executable, "-m", "sqshforge")
    with engines.storage(folder / "engine"):
        run(root, *command, "lock", TARGET)
        run(root, *command, "build", TARGET)
        made = root / "build" / f"{TARGET}.sqsh"
        run(root, *command, "pack", TARGET, "-o", made, "--profile", "fast", "--no-cache")
        yield made
    shutil.rmtree(folder)


def test_what_nccl_looks_for_is_found(sqsh: Path) -> None:
    """By the loader, in the image's own environment; and the launcher sees the plugin's version."""
    words = (sys.executable, "-m", "sqshforge", "run", sqsh, "--", "python3", "-c", LOOK)
    found = json.loads(run(sqsh.parents[1], *words).splitlines()[-1])
    assert found == {"plugin": [1, 19, 0], "installer": [1, 48, 0]}


def test_the_licenses_are_there_and_named(sqsh: Path) -> None:
    def within(name: str) -> str:
        return run(sqsh.parent, "unsquashfs", "-cat", sqsh, name)

    assert within("usr/share/doc/gdrcopy/LICENSE") == "MIT\n"
    assert "Apache License" in within("sqshforge/LICENSE")
    packages = json.loads(within("sqshforge/meta/sbom.spdx.json"))["packages"]
    source = next(one for one in packages if one["name"] == "gdrcopy")
    assert source["licenseDeclared"] == "MIT"
    assert "/usr/share/doc/gdrcopy/LICENSE" in source["sourceInfo"]
