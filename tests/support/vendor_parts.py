"""Parts that only vendors' hosts provide, made up from the small files in vendors/.

Each part has the layout of the real one and accepts what the real one does: options, make targets,
variables, Debian packages. Parts that compile fail if their stage has a network.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).with_name("vendors")
Files = Mapping[str, str | bytes]

CUDA_PROGRAMS = ("cuobjdump", "nvdisasm", "ptxas")
_PROGRAM = "#!/bin/sh\necho V12.3.52\n"
_LLVM = {"include/llvm/Config.h": "", "lib/cmake/mlir/MLIRConfig.cmake": ""}
# Packages of EFA's installer, with the Debian packages that those of rdma-core depend on.
_RDMA_CORE = {
    "ibacm": "Depends: lsb-base (>= 3.2-14~), rdma-core (>= 15), libsystemd0\n",
    "infiniband-diags": "Depends: perl:any\n",
    "libibverbs-dev": "Depends: libibverbs1, libnl-3-dev, libnl-route-3-dev\n",
    "libibverbs1": "Depends: adduser\n",
    "rdma-core": "Pre-Depends: init-system-helpers (>= 1.54~)\n"
    "Depends: lsb-base (>= 3.2-14~), udev, libnl-3-200, libsystemd0, libudev1\n"
    "Recommends: dmidecode, ethtool, iproute2\n",
}
_RELEASE = """Codename: {suite}
Components: {component}
Architectures: amd64
Date: Tue, 02 Jan 2024 00:00:00 UTC
SHA256:
 {sum} {size} {component}/binary-amd64/Packages
"""


def part(name: str, web: str, **words: str) -> dict[str, str]:
    """Return the files of a part, with the address of a web server that it tries to reach."""
    values = {"WEB": web, **words}
    found = {"offline.py": (FOLDER / "offline.py").read_text()}
    folder = FOLDER / name
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_text()
    for key, value in values.items():
        found = {file: text.replace(f"@{key}@", value) for file, text in found.items()}
    return found


def written(place: Path, files: Files) -> Path:
    """Write these files into a folder; scripts among them are executable."""
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bytes(text))
        if _bytes(text).startswith(b"#!"):
            path.chmod(0o755)
    return place


def packed(path: Path, files: Files) -> str:
    """Pack these files, all executable, into a tar; returns its address."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "xz" if path.suffix == ".xz" else "gz"
    with tarfile.open(path, f"w:{kind}") as archive:  # type: ignore[call-overload]
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(_bytes(text)), 0o755
            archive.addfile(member, io.BytesIO(_bytes(text)))
    return path.as_uri()


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def repository(place: Path, files: Files, ref: str = "main") -> str:
    """Make a git repository with one commit of these files on a branch; returns the commit."""
    written(place, files)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    git = ["git", "-C", str(place), *who]
    for words in (
        ["init", "--quiet", "-b", ref],
        ["add", "--force", "."],
        ["commit", "--quiet", "-m", "x"],
    ):
        subprocess.run([*git, *words], check=True)
    argv = [*git, "rev-parse", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def efa(path: Path) -> str:
    """Pack the archive of EFA's installer, of the version in its name."""
    version = path.name.removeprefix("aws-efa-installer-").removesuffix(".tar.gz")
    script = part("efa", "", VERSION=version)["efa_installer.sh"]
    files: dict[str, str | bytes] = {"efa_installer.sh": script, "common.sh": ""}
    files["DEBS/names"] = " ".join(sorted(_RDMA_CORE))
    with tempfile.TemporaryDirectory() as folder:
        for name, needs in _RDMA_CORE.items():
            made, _ = _debian_package(f"{name}=58.0-1", Path(folder), needs=needs)
            files[f"DEBS/rdma-core/{name}_58.0-1_amd64.deb"] = made
    return packed(path, {f"aws-efa-installer/{name}": files[name] for name in files})


def llvm(path: Path) -> str:
    """Pack the archive of the LLVM that Triton is compiled with."""
    return packed(path, {f"{path.name.split('.')[0]}/{name}": _LLVM[name] for name in _LLVM})


def cuda_program(path: Path, program: str) -> str:
    """Pack the archive of one of NVIDIA's programs that Triton bundles."""
    return packed(path, {f"cuda-1/bin/{program}": _PROGRAM, "cuda-1/LICENSE": ""})


def apt_archive(suite: str, component: str, packages: Iterable[str]) -> dict[str, bytes]:
    """Make a signed archive of Debian packages (NAME=VERSION): its files, and `key`.

    Each package installs a program of its name to /opt/aws/neuron/bin.
    """
    # The path must be short, because gpg's agent has a socket there.
    with tempfile.TemporaryDirectory(prefix="apt-") as name:
        folder = Path(name)
        files: dict[str, bytes] = {}
        index = ""
        for pin in packages:
            program = {f"opt/aws/neuron/bin/{pin.partition('=')[0]}": "#!/bin/sh\n"}
            made, control = _debian_package(pin, folder, program)
            place = f"pool/{pin.replace('=', '_')}_amd64.deb"
            files[place] = made
            total = hashlib.sha256(made).hexdigest()
            index += f"{control}Filename: {place}\nSize: {len(made)}\nSHA256: {total}\n\n"
        listed = index.encode()
        release = _RELEASE.format(
            suite=suite,
            component=component,
            sum=hashlib.sha256(listed).hexdigest(),
            size=len(listed),
        )
        files[f"dists/{suite}/InRelease"], files["key"] = _signed(release, folder)
        return files | {f"dists/{suite}/{component}/binary-amd64/Packages": listed}


def _debian_package(
    pin: str, folder: Path, files: Files | None = None, needs: str = ""
) -> tuple[bytes, str]:
    """Build a package NAME=VERSION from these files; returns it and its control fields."""
    name, _, version = pin.partition("=")
    control = (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n{needs}"
        "Maintainer: test <test@example.org>\nDescription: made up\n"
    )
    tree = written(folder / name, {"DEBIAN/control": control, **(files or {})})
    made = folder / f"{name}.deb"
    argv: list[str | Path] = ["dpkg-deb", "--root-owner-group", "--build", tree, made]
    subprocess.run(argv, check=True, capture_output=True)
    return made.read_bytes(), control


def _signed(text: str, folder: Path) -> tuple[bytes, bytes]:
    """Sign a text; returns it with its signature, and the key that it was signed with."""
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
    env = {**os.environ, "GNUPGHOME": str(home)}
    try:
        made = ["--quick-generate-key", "test <test@example.org>", "rsa2048", "sign", "never"]
        subprocess.run([*gpg, *made], check=True, env=env, capture_output=True)
        argv = [*gpg, "--clearsign"]
        done = subprocess.run(argv, check=True, env=env, capture_output=True, input=text.encode())
        argv = [*gpg, "--armor", "--export"]
        key = subprocess.run(argv, check=True, env=env, capture_output=True).stdout
        return done.stdout, key
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], check=True, env=env)
        shutil.rmtree(home, ignore_errors=True)
