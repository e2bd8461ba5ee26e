"""cuda-mamba without NVIDIA's images: its stages really built, on Ubuntu 22.04 from its packages.

The base, Debian packages, builders and template are real. NVIDIA's archives, EFA's installer, NCCL,
its plugin and the kernels' source are stand-ins, which look for CUDA's compiler where the real ones
do. Triton is left out: tests/stages/test_triton.py tests its stage.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from sqshforge import recipe as recipes
from tests.support import checkouts, engines, vendor_parts

pytestmark = [pytest.mark.root, pytest.mark.timeout(2400)]

TARGET = "second-base"
ORIGINAL = "cuda-mamba-ubuntu"
# It compiles its input with the C compiler, as nvcc does with the host's part of a file.
NVCC = """#!/bin/sh
test "$1" != --version || { echo "Cuda compilation tools, release 12.1, V12.1.105"; exit 0; }
exec gcc -I/usr/local/cuda/include "$@"
"""
SETUP = """import os, shutil, subprocess
from setuptools import setup
assert shutil.which("nvcc") == "/usr/local/cuda/bin/nvcc", shutil.which("nvcc")
home = os.environ["CUDA_HOME"]
assert os.environ["CUDA_ARCHITECTURES"] == "80 86 90"
site = "/usr/local/lib/python3.10/dist-packages"
libraries = ("cublas", "cusolver", "cusparse")
assert os.environ["CPATH"].split(":") == [f"{site}/nvidia/{one}/include" for one in libraries]
assert os.path.isdir(f"{site}/yaml")  # the image's own packages, which are only looked at
with open("kernel.c", "w") as file:
    file.write('#include <cuda_runtime_api.h>\\nint here(void) { return cudaVersion(); }\\n')
words = ["-shared", "-fPIC", "kernel.c", f"-L{home}/lib64", "-lcudart", "-o", "kernel.so"]
subprocess.check_call(["nvcc", *words])
setup(name="causal-conv1d", version="1.2.0.post1", py_modules=["causal_conv1d"])
"""
NCCL = """CUDA_HOME ?= /usr/local/cuda
src.build:
\ttest "$$($(CUDA_HOME)/bin/nvcc --version | sed 's/.*release //; s/,.*//')" = 12.1
\ttest -e $(CUDA_HOME)/lib64/libcudart_static.a
\techo '$(NVCC_GENCODE)' | grep -q 'arch=compute_90,code=sm_90'
\techo 'int ncclGetVersion(void) { return 0; }' >nccl.c
\t$(CUDA_HOME)/bin/nvcc -shared -fPIC -o libnccl.so.2 nccl.c
install:
\tmkdir -p $(PREFIX)/lib
\tcp libnccl.so.2 $(PREFIX)/lib/
"""
CONFIGURE = """#!/bin/sh
case " $* " in *" --with-cuda=/usr/local/cuda "*) ;; *) exit 1 ;; esac
test -e /usr/local/cuda/include/cuda.h && test -d /opt/amazon/efa/lib
"""
PLUGIN = """install:
\tmkdir -p /opt/aws-ofi-nccl/lib
\ttouch /opt/aws-ofi-nccl/lib/libnccl-net.so
"""
LOOK = """
import causal_conv1d, ctypes, json, os
ctypes.CDLL("/opt/nccl/lib/libnccl.so.2")
print(json.dumps({
    "system": open("/etc/os-release").read(),
    "cuda": os.path.exists("/usr/local/cuda"),
    "libraries": os.environ["LD_LIBRARY_PATH"].split(":"),
    "plugin": os.path.exists("/opt/aws-ofi-nccl/lib/libnccl-net.so"),
    "gpus": os.environ["NVIDIA_VISIBLE_DEVICES"],
}))
"""


def repository(place: Path, files: Mapping[str, str]) -> str:
    """Make a git repository with these files, all executable; returns the commit of main."""
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    git = ["git", "-C", str(place), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for words in (["init", "--quiet", "-b", "main"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    argv = [*git, "rev-parse", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def archives(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Make archives with the layout of NVIDIA's; returns their addresses."""
    made = folder / "libcudart.so"
    source = b"int cudaVersion(void) { return 12010; }\n"
    argv = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcudart.so.12"]
    subprocess.run([*argv, "-o", str(made)], check=True, input=source)
    files: Mapping[str, Mapping[str, bytes]] = {
        "cuda-cccl": {"include/nv/target": b""},
        "cuda-cudart": {
            "include/cuda.h": b"",
            "include/cuda_runtime_api.h": b"int cudaVersion(void);\n",
            "lib/libcudart.so": made.read_bytes(),
            "lib/libcudart_static.a": b"!<arch>\n",
        },
        "cuda-nvcc": {"bin/nvcc": NVCC.encode()},
    }
    return {name: {"url": _archive(folder, name, these)} for name, these in files.items()}


def _archive(folder: Path, name: str, files: Mapping[str, bytes]) -> str:
    path = folder / f"{name}-archive.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for place, content in {"LICENSE": b"NVIDIA's\n", **files}.items():
            member = tarfile.TarInfo(f"{name}-archive/{place}")
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return path.as_uri()


def sources(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Make repositories that stand in for what is compiled."""
    trees = {
        "causal-conv1d": {"setup.py": SETUP, "causal_conv1d.py": "", "LICENSE": "BSD\n"},
        "nccl": {"Makefile": NCCL, "LICENSE.txt": "BSD\n"},
        "aws-ofi-nccl": {
            "autogen.sh": "#!/bin/sh\n",
            "configure": CONFIGURE,
            "Makefile": PLUGIN,
            "LICENSE": "Apache\n",
        },
    }
    found = {}
    for name, files in trees.items():
        commit = repository(folder / name, files)
        found[name] = {"git": (folder / name).as_uri(), "ref": "main", "commit": commit}
    return found


def recipe(root: Path, folder: Path) -> None:
    """Write the real target's recipe without torch, Triton and what comes from vendors' hosts."""
    data = yaml.safe_load(recipes.whole(root / "recipes" / f"{ORIGINAL}.yaml"))
    data.pop("triton")
    data |= {"target": TARGET, "template": TARGET, "patches": {}, "launchers": [], "smoke": {}}
    data |= {"sources": sources(folder), "disk_gb": 3.0}
    installer = folder / "aws-efa-installer-1.30.0.tar.gz"
    vendor_parts.efa(installer)
    data["archives"] = {"efa": {"url": installer.as_uri()}, **archives(folder)}
    yml = next(one for one in data["python"]["packages"] if "pyyaml" in one)
    built = {"package": "causal-conv1d==1.2.0.post1", "source": "causal-conv1d"}
    data["python"] |= {"packages": [yml], "built": [built]}
    (root / "recipes" / f"{TARGET}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    template = (root / "images" / "cuda.Dockerfile.j2").read_text()
    for of_triton in ("{{ triton_wheel.build(triton) }}", '["triton"] + '):
        assert template.count(of_triton) == 1
        template = template.replace(of_triton, "")
    (root / "images" / f"{TARGET}.Dockerfile.j2").write_text(template)


def run(root: Path, *words: str | Path) -> str:
    """Run a command in a folder; returns its output."""
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
    folder = tmp_path_factory.mktemp("second")
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


def test_what_is_compiled_finds_cuda_and_the_image_keeps_none_of_its_compiler(sqsh: Path) -> None:
    words = (sys.executable, "-m", "sqshforge", "run", sqsh, "--", "python3", "-c", LOOK)
    found = json.loads(run(sqsh.parents[1], *words).splitlines()[-1])
    assert 'VERSION_ID="22.04"' in found.pop("system")
    assert found == {
        "cuda": False,
        "libraries": ["/opt/aws-ofi-nccl/lib", "/opt/amazon/openmpi/lib", "/opt/amazon/efa/lib"],
        "plugin": True,
        "gpus": "all",
    }
