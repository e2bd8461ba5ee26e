"""Versions of the software that carries data between nodes: the advice for EFA depends on them."""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.job.types import file_text

Version = tuple[int, ...]
"""The numbers of a version; empty: not known, which is taken for the current generation."""

AMAZON = Path("opt/amazon")
PLUGINS = ("opt/aws-ofi-nccl", "opt/aws-ofi-nccl/install", "opt/amazon/ofi-nccl")
RECORD = Path("sqshforge/meta/lock.json")
TIMEOUT = 10  # seconds for fi_info


@dataclass(frozen=True, kw_only=True)
class Software:
    """The versions in the image, and the kernel's."""

    libfabric: Version = ()
    plugin: Version = ()  # aws-ofi-nccl
    tuner: str = ""  # path of the plugin's tuner; empty: it has none
    installer: Version = ()  # of EFA
    nccl: Version = ()
    kernel: Version = ()

    def described(self) -> str:
        """List the versions that are known."""
        named = {
            "libfabric": self.libfabric,
            "aws-ofi-nccl": self.plugin,
            "EFA installer": self.installer,
            "NCCL": self.nccl,
        }
        return ", ".join(f"{name} {format_version(one)}" for name, one in named.items() if one)


def parse_version(text: str) -> Version:
    """Parse the numbers at the beginning of a version: v1.9.1-aws is 1, 9, 1."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def format_version(version: Version) -> str:
    """Format a version."""
    return ".".join(str(part) for part in version)


def is_older(one: Version, than: str) -> bool:
    """Tell whether a version is known and older than another."""
    return bool(one) and one < parse_version(than)


def look_at_software(root: Path, environment: Mapping[str, str]) -> Software:
    """Look up the libraries below `root`, and those that the environment names."""
    installed = file_text(root / AMAZON / "efa_installed_packages")
    plugin, tuner = _plugin(root, environment)
    return Software(
        libfabric=_libfabric(root, installed, environment),
        plugin=plugin,
        tuner=tuner,
        installer=_first(r"EFA installer version:\s*(\S+)", installed),
        nccl=_nccl(root, environment),
        kernel=parse_version(file_text(root / "proc/sys/kernel/osrelease")),
    )


def _libfabric(root: Path, installed: str, environment: Mapping[str, str]) -> Version:
    """The version of EFA's libfabric: from its .pc file, else the installer's list, else fi_info.

    The library's file name has the version of its interface, which is a different one.
    """
    for file in sorted((root / AMAZON / "efa").glob("lib*/pkgconfig/libfabric.pc")):
        return _first(r"(?m)^Version:\s*(\S+)", file_text(file))
    listed = _first(r"(?m)^libfabric\d?-aws[-_](\d\S*)", installed)
    program = shutil.which("fi_info", path=environment.get("PATH", ""))
    if listed or program is None:
        return listed
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [program, "--version"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=TIMEOUT)
        return _first(r"(?m)^libfabric:\s*(\S+)", done.stdout)
    return ()


def _plugin(root: Path, environment: Mapping[str, str]) -> tuple[Version, str]:
    """The version of aws-ofi-nccl, from the text that its library logs, and its tuner's path."""
    named = [one for one in environment.get("LD_LIBRARY_PATH", "").split(":") if one]
    folders = [root / one.lstrip("/") for one in named]
    folders += [one for place in PLUGINS for one in sorted((root / place).glob("lib*"))]
    folders += [one for place in PLUGINS for one in sorted((root / place).glob("lib/*-linux-gnu"))]
    for folder in folders:
        for file in sorted(folder.glob("libnccl-net*.so")):
            said = parse_version(_said(file, rb"aws-ofi-nccl v?(\d+\.[\w.-]+)"))
            found = said or _recorded(root, "aws-ofi-nccl")
            tuner = folder / "libnccl-ofi-tuner.so"
            return found, f"/{tuner.relative_to(root)}" if tuner.exists() else ""
    return (), ""


def _nccl(root: Path, environment: Mapping[str, str]) -> Version:
    """The version of NCCL: of a library that LD_PRELOAD names, else of torch's package."""
    for one in re.split(r"[: ]", environment.get("LD_PRELOAD", "")):
        if "libnccl.so" in one:
            file = root / one.lstrip("/")
            named = parse_version(file.resolve().name.removeprefix("libnccl.so."))
            return named if named[1:] else _recorded(root, "nccl")
    packages = root / sysconfig.get_path("purelib").lstrip("/")
    for folder in sorted(packages.glob("nvidia_nccl_cu*.dist-info")):
        return parse_version(folder.name.split("-")[1])
    return ()


def _recorded(root: Path, name: str) -> Version:
    """The version of a source, from the lock file in the image."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        for one in json.loads(file_text(root / RECORD))["sources"]:
            if one["name"] == name:
                return parse_version(one["ref"])
    return ()


def _said(file: Path, pattern: bytes) -> str:
    """Find a text inside a library, by the pattern's group; empty if either is missing."""
    with (
        contextlib.suppress(OSError, ValueError),  # ValueError: the file is empty
        file.open("rb") as library,
        mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as held,
    ):
        found = re.search(pattern, held)
        return found[1].decode("ascii", "replace") if found else ""
    return ""


def _first(pattern: str, text: str) -> Version:
    found = re.search(pattern, text)
    return parse_version(found[1]) if found else ()
