"""The license files of what an image is compiled from, taken from the sources' tars."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result


def tar(folder: Path, name: str, *files: str, prefix: str = "") -> Path:
    """Make a source as the build has it: NAME.tar, with its files at the top."""
    place = folder / f"{name}.tar"
    with tarfile.open(place, "w") as made:
        for file in files:
            member = tarfile.TarInfo(prefix + file)
            member.size = len(file)
            made.addfile(member, io.BytesIO(file.encode()))
    return place


def licenses(root: Path, into: Path, *tars: Path) -> Result:
    program = root / "images" / "inside" / "licenses.py"
    return Programs().attempt([sys.executable, "-B", program, "--into", into, *tars])


@pytest.mark.processes
@pytest.mark.parametrize("prefix", ["", "./"])
def test_each_source_has_a_folder_with_its_files(root: Path, tmp_path: Path, prefix: str) -> None:
    """The names are those in NCCL, aws-ofi-nccl and GDRCopy; parts of a source do not count."""
    files = ("LICENSE.txt", "ThirdPartyNotices.txt", "README.md", "src/LICENSE", "licenses.py.in")
    nccl = tar(tmp_path, "nccl", *files[:4], prefix=prefix)
    plugin = tar(tmp_path, "aws-ofi-nccl", "LICENSE", "NOTICE", "NOTES", prefix=prefix)
    done = licenses(root, tmp_path / "into", nccl, plugin)
    assert done.code == 0, done.err
    found = {str(one.relative_to(tmp_path / "into")) for one in (tmp_path / "into").rglob("*.*")}
    assert found == {"nccl/LICENSE.txt", "nccl/ThirdPartyNotices.txt"}
    assert {one.name for one in (tmp_path / "into/aws-ofi-nccl").iterdir()} == {"LICENSE", "NOTICE"}
    assert (tmp_path / "into/nccl/LICENSE.txt").read_text() == "LICENSE.txt"
    assert (tmp_path / "into/nccl/LICENSE.txt").stat().st_mode & 0o777 == 0o644
    assert "nccl: LICENSE.txt ThirdPartyNotices.txt" in done.out


@pytest.mark.processes
@pytest.mark.parametrize("content", [None, b"", b"no tar"])
def test_a_source_without_one_ends_the_build_in_one_line(
    root: Path, tmp_path: Path, content: bytes | None
) -> None:
    source = tar(tmp_path, "bare", "README.md", "src/LICENSE")
    if content is not None:
        source.write_bytes(content)
    done = licenses(root, tmp_path / "into", source)
    assert done.code == 1
    assert done.err.startswith(f"licenses.py: {source}: ")
    assert len(done.err.splitlines()) == 1
