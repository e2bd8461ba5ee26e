"""Stand-ins for base images that only vendors' registries have: Ubuntu 22.04 from its packages.

neuron29-mamba2 makes Ubuntu 24.04 itself.

The recipes of the heavy targets are built on the stand-in through a mirror. Recipes that extend the
real ones remove whatever needs a vendor's host (CUDA's compiler, git tags, EFA's installer).
"""

from __future__ import annotations

import hashlib
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import yaml

from sqshforge import recipe
from sqshforge.build import build
from sqshforge.host.programs import Programs

ARCHIVE = "http://archive.ubuntu.com/ubuntu"
KEYRING = f"{ARCHIVE}/pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
KEYRING_SHA256 = "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f"
IMAGE = "localhost/sqshforge-standin:jammy"

# Removes what cannot be built without vendors' hosts.
CUDA = {
    "triton": {"from": "wheel"},
    "sources": None,
    "archives": None,
    "patches": {"causal-conv1d": None, "mamba": None},
    "python": {"built": None},
}
# With the public index's torch and CUDA's libraries, because only PyTorch's index has the CPU
# build.
NEURON = {"apt_sources": None, "archives": None}
RECIPES: Mapping[str, Mapping[str, object]] = {
    "cuda-mamba": CUDA,
    "composer-mamba": CUDA,
    "llama-fsdp": CUDA,
    "neuron-mamba2": {**NEURON, "python": {"indexes": None, "packages": ["torch==2.5.1"]}},
    "neuron29-mamba2": {**NEURON, "python": {"indexes": None, "packages": ["torch==2.9.1"]}},
    # Its base has Python and torch; here, the stand-in of cuda-mamba takes its place.
    "smp-llama": {"smoke": {"train": {"dataset": "text:/usr/lib/python{python}/**/*.py"}}},
}
# What an image here lacks, compared with the target's own.
NETWORK = "NVIDIA's base, EFA, NCCL and its plugin"
LACKING: Mapping[str, str] = {
    "cuda-mamba": f"{NETWORK}, the compiled kernels and Triton from source",
    "composer-mamba": f"{NETWORK}, the compiled kernels and Triton from source",
    "llama-fsdp": f"{NETWORK}, Triton from source",
    "smp-llama": "its base: that of cuda-mamba here",
    "neuron-mamba2": "Neuron's packages and EFA, but with CUDA's libraries",
    "neuron29-mamba2": "Neuron's packages and EFA, but with CUDA's libraries",
    "cuda13-mamba": "EFA and GDRCopy; compiled for 90 alone",
}
MIRRORS = {
    "nvidia/cuda:12.1.1-base-ubuntu22.04": IMAGE,
    "nvidia/cuda:12.1.1-devel-ubuntu22.04": IMAGE,
    "ubuntu:22.04": IMAGE,
}
SMP = "658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel"
SMP_TAG = "2.2.0-gpu-py310-cu121"
# A base with another Python: cpu-mamba, which has Python 3.11 and a torch, stands in for it.
SMP_OTHER = {"tag": "2.4.1-gpu-py311-cu121", "python": "3.11", "torch": "2.4.1"}


def name_of(target: str) -> str:
    return f"standin-{target}"


def prepare(root: Path) -> None:
    """Give a copy of the checkout the stand-ins' recipes, locks to start from, and mirrors."""
    for target, changes in RECIPES.items():
        name = name_of(target)
        data = {
            "target": name,
            "extends": target,
            "title": f"{target} on a stand-in for its base",
            "disk_gb": 20.0,
            **changes,
        }
        _put(root, target, data)
    _put(root, "cuda13-mamba", _for_hopper(root))
    images = {
        **MIRRORS,
        f"{SMP}:{SMP_TAG}": build.name_of(name_of("cuda-mamba"), root),
        f"{SMP}:{SMP_OTHER['tag']}": build.name_of("cpu-mamba", root),
    }
    (root / "mirrors.yaml").write_text(yaml.safe_dump({"images": images}))


def _put(root: Path, target: str, data: Mapping[str, object]) -> None:
    """Write the recipe of a stand-in, and its target's lock to start from."""
    name = name_of(target)
    (root / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(dict(data), sort_keys=False))
    locks = root / "recipes" / "locks"
    (locks / f"{name}.lock").write_bytes((locks / f"{target}.lock").read_bytes())


def _for_hopper(root: Path) -> dict[str, object]:
    """cuda13-mamba for one architecture; an extending recipe could only add to the list."""
    target = "cuda13-mamba"
    whole: dict[str, object] = yaml.safe_load(recipe.whole(root / "recipes" / f"{target}.yaml"))
    dropped = {key: whole[key] for key in whole if key not in ("sources", "archives")}
    changes = {"target": name_of(target), "template": target, "cuda": {"architectures": ["90"]}}
    return {**dropped, **changes}


def base(cache: Path) -> None:
    """Make Ubuntu 22.04 as a buildah image; its tar is kept for the next time."""
    tar = cache / "standin-jammy.tar"
    if not tar.is_file():
        _bootstrap(cache, tar)
    programs = Programs()
    container = programs.capture(["buildah", "from", "scratch"]).strip()
    try:
        programs.capture(["buildah", "add", "--quiet", container, tar, "/"])
        programs.capture(["buildah", "commit", "--quiet", container, IMAGE])
    finally:
        programs.capture(["buildah", "rm", container])


def _bootstrap(cache: Path, tar: Path) -> None:
    package = cache / "ubuntu-keyring.deb"
    with urllib.request.urlopen(KEYRING, timeout=60) as answer:
        content = answer.read()
    assert hashlib.sha256(content).hexdigest() == KEYRING_SHA256
    package.write_bytes(content)
    keys = cache / "ubuntu-keyring"
    subprocess.run(["dpkg-deb", "--extract", package, keys], check=True)
    key = keys / "usr/share/keyrings/ubuntu-archive-keyring.gpg"
    lines = [
        f"deb [signed-by={key}] {ARCHIVE} {suite} main universe"
        for suite in ("jammy", "jammy-updates", "jammy-security")
    ]
    partial = tar.with_suffix(".part.tar")
    # The image gets Ubuntu's own keyring, and no path of this machine.
    forget = 'sed -i "s/\\[signed-by=[^]]*\\] //" "$1/etc/apt/sources.list"'
    argv = ["mmdebstrap", "--variant=minbase", "--include=apt,ca-certificates"]
    argv += ['--aptopt=APT::Sandbox::User "root"']  # root may read the tests' folders
    argv += [f"--customize-hook={forget}", "jammy", str(partial), *lines]
    subprocess.run(argv, check=True, capture_output=True, timeout=600)
    partial.rename(tar)
