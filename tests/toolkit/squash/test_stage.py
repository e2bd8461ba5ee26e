"""A copy of a squash file on a node's own disk: made once, verified, reused, within a limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sqshforge.errors import WorkError
from sqshforge.squash import request
from sqshforge.squash import stage as staging

pytestmark = pytest.mark.processes

OLD = 10_000  # seconds ago: no job is about to start it


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sqshforge", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True)


def own(disk: Path) -> Path:
    """Return this user's folder among the copies."""
    return disk / str(os.geteuid())


def packed(folder: Path, name: str, size: int = 200_000) -> Path:
    """Make a real squash file with a record, of random content."""
    tree = folder / f"{name}.tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc" / "os-release").write_text("ID=test\n")
    (tree / "blob").write_bytes(os.urandom(size))
    file = folder / f"{name}.sqsh"
    done = command("pack", f"rootfs:{tree}", "-o", file, "--no-cache")
    assert done.returncode == 0, done.stderr
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return packed(tmp_path, "a")


def age(copy: Path, seconds: float = OLD) -> None:
    then = copy.stat().st_mtime - seconds
    os.utime(copy, (then, then))


def test_a_copy_is_made_once_and_named_by_its_content(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    assert command("stage", file, disk, "--look").returncode == 1
    first = command("stage", file, disk)
    assert first.returncode == 0, first.stderr
    copy = Path(first.stdout.splitlines()[-1])
    facts = request.read_record(file)
    assert facts is not None and copy == own(disk) / f"{facts['digest'].partition(':')[2]}.sqsh"
    assert copy.read_bytes() == file.read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o644
    inode = copy.stat().st_ino
    assert command("stage", file, disk, "--look").returncode == 0
    second = command("stage", file, disk)
    assert second.stdout.splitlines()[-1] == str(copy) and copy.stat().st_ino == inode
    assert "there already" in second.stdout + second.stderr
    assert command("verify", copy).returncode == 0
    assert sorted(one.name for one in copy.parent.iterdir()) == [copy.name, f"{copy.name}.json"]


def test_a_folder_packed_again_is_copied_again(tmp_path: Path) -> None:
    """Its content key does not depend on its content, and both files have the same size."""
    tree, file, disk = tmp_path / "tree", tmp_path / "a.sqsh", tmp_path / "disk"
    for name in ("etc", "opt"):
        (tree / name).mkdir(parents=True)
    for text in ("aaa", "bbb"):
        (tree / "opt/f").write_text(text)
        for path in (*tree.rglob("*"), tree):
            os.utime(path, (1_000_000_000, 1_000_000_000))
        done = command("pack", f"rootfs:{tree}", "-o", file, "--no-cache")
        assert done.returncode == 0, done.stderr
        done = command("stage", file, disk)
        assert done.returncode == 0, done.stderr
        copy = Path(done.stdout.splitlines()[-1])
        shown = subprocess.run(["unsquashfs", "-cat", copy, "opt/f"], stdout=subprocess.PIPE)
        assert shown.stdout == text.encode()


def test_a_copy_named_as_before_goes_like_any_other(file: Path, tmp_path: Path) -> None:
    """Copies used to be named after the content key."""
    disk = tmp_path / "disk"
    copy = Path(command("stage", file, disk).stdout.splitlines()[-1])
    facts = request.read_record(file)
    assert facts is not None
    earlier = copy.with_name(f"{facts['key'].partition(':')[2]}.sqsh")
    copy.rename(earlier)
    request.record_path(copy).rename(request.record_path(earlier))
    limit = ("--limit", str(file.stat().st_size + 1000))
    assert command("stage", file, disk, *limit).returncode == 3
    age(earlier)
    assert command("stage", file, disk, *limit).returncode == 0
    assert not earlier.exists() and not request.record_path(earlier).exists()


def test_a_file_without_a_record_is_named_by_its_digest(file: Path, tmp_path: Path) -> None:
    request.record_path(file).unlink()
    done = command("stage", file, tmp_path / "disk")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).read_bytes() == file.read_bytes()


def test_what_is_not_what_its_record_says_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "one two").mkdir()
    file = packed(tmp_path / "one two", "a")
    with file.open("r+b") as broken:
        broken.seek(file.stat().st_size // 2)
        broken.write(b"\xff\x00\xff\x00")
    done = command("stage", file, tmp_path / "disk")
    assert done.returncode == 1
    assert "does not match the record" in done.stderr
    assert f"sqshforge verify '{file}' tells" in done.stderr
    assert not (tmp_path / "disk").exists()


def test_a_file_of_the_same_size_with_the_record_of_another(file: Path, tmp_path: Path) -> None:
    """For example, a file is packed again and copied over the earlier one without its record."""
    disk = tmp_path / "disk"
    assert command("stage", file, disk).returncode == 0
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    done = command("stage", file, disk)
    assert done.returncode == 1 and "there already" not in done.stderr
    assert "error: the file does not match the record beside it" in done.stderr
    assert "fix:   copy a.sqsh.json with the file, or remove it" in done.stderr
    request.record_path(file).unlink()
    done = command("stage", file, disk)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).read_bytes() == data


def test_a_copied_file_with_its_record_is_the_same(file: Path, tmp_path: Path) -> None:
    identity = staging.Identity.of(file)
    (tmp_path / "shared").mkdir()
    for one in (file, request.record_path(file)):
        shutil.copy(one, tmp_path / "shared")
    assert staging.Identity.of(tmp_path / "shared" / file.name) == identity


def test_what_the_first_node_has_read_no_node_reads_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = staging.Identity.of(file)
    (tmp_path / "shared").mkdir()
    copied = Path(shutil.copy(file, tmp_path / "shared"))
    bare = staging.Identity.of(copied)
    assert bare.name == found.digest.partition(":")[2]
    monkeypatch.setattr(staging.files, "digest", None)
    assert staging.Identity.of(copied, found.digest) == bare
    shutil.copy(request.record_path(file), tmp_path / "shared")
    assert staging.Identity.of(copied, found.digest) == found
    assert staging.Identity.of(file) == found  # untouched since it was packed
    with pytest.raises(WorkError, match="does not match the record"):
        staging.Identity.of(copied, f"sha256-16MiB:{'0' * 64}")


def test_a_copy_that_was_brought_is_checked_and_moved(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    own(disk).mkdir(parents=True)
    arrived = own(disk) / ".7.sqsh"
    arrived.write_bytes(file.read_bytes()[:-1])
    assert command("stage", file, disk, "--arrived", arrived).returncode == 1
    assert list(own(disk).iterdir()) == []
    arrived.write_bytes(file.read_bytes())
    done = command("stage", file, disk, "--arrived", arrived)
    assert done.returncode == 0, done.stderr
    assert not arrived.exists()
    assert Path(done.stdout.splitlines()[-1]).read_bytes() == file.read_bytes()


def test_a_copy_that_was_brought_counts_once(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    own(disk).mkdir(parents=True)
    arrived = own(disk) / ".7.sqsh"
    arrived.write_bytes(file.read_bytes())
    limit = file.stat().st_size + 1000
    done = command("stage", file, disk, "--arrived", arrived, "--limit", str(limit))
    assert done.returncode == 0, done.stderr
    assert not arrived.exists()
    arrived.write_bytes(b"of a start that was killed")
    other = packed(tmp_path, "b")
    brought = ("--arrived", arrived, "--limit", str(limit))
    assert command("stage", other, disk, *brought).returncode == 3
    assert not arrived.exists()


def test_a_look_makes_the_room_that_sbcast_takes(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    copy = Path(command("stage", file, disk).stdout.splitlines()[-1])
    other = packed(tmp_path, "b")
    look = ("--look", "--limit", str(file.stat().st_size + 1000))
    done = command("stage", other, disk, *look)
    assert done.returncode == 3 and "STAGE_LIMIT" in done.stderr
    age(copy)
    assert command("stage", file, disk, *look).returncode == 0 and copy.exists()
    left = own(disk) / ".7.sqsh"
    left.write_bytes(b"of a start that was killed")
    assert command("stage", other, disk, *look, "--arrived", left).returncode == staging.LACKING
    assert list(own(disk).iterdir()) == []


# Two nodes, each with its own disk. Without -K0 this srun ends all tasks when one fails, as with
# KillOnBadExit=1 in slurm.conf.
SRUN = """#!/bin/bash
disk={disk}
code=0
ending=1
while [[ $1 == -* ]]; do if [[ $1 == -K0 ]]; then ending=; fi; shift; done
for node in 1 2; do
    "${{@//$disk/$disk-$node}}" || code=$?
    if [[ $code != 0 && -n $ending ]]; then exit 137; fi
done
exit $code
"""
SBCAST = """#!/bin/bash
disk={disk}
for node in 1 2; do cp "$2" "${{3//$disk/$disk-$node}}"; done
echo sbcast >> $disk.calls
"""


def test_of_two_nodes_one_has_it_already(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, tools = tmp_path / "disk", tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("sbcast", SBCAST)):
        (tools / name).write_text(text.format(disk=disk))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    here = f"{disk}-2"
    assert command("stage", file, here).returncode == 0
    limit = str(file.stat().st_size + 1000)
    for _ in range(2):
        done = command("stage", file, disk, "--all-nodes", "--limit", limit)
        assert done.returncode == 0, done.stderr
        name = Path(done.stdout.splitlines()[-1]).name
        for node in (1, 2):
            found = sorted(one.name for one in own(Path(f"{disk}-{node}")).iterdir())
            assert found == [name, f"{name}.json"]
    assert Path(f"{disk}.calls").read_text() == "sbcast\n"


def test_of_many_one_copies(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: command("stage", file, disk), range(8)))
    assert [one.returncode for one in done] == [0] * 8, [one.stderr for one in done]
    assert len({one.stdout.splitlines()[-1] for one in done}) == 1
    assert len(list(own(disk).glob("*.sqsh"))) == 1 and not list(own(disk).glob(".*"))


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    files = [packed(tmp_path, name) for name in "abc"]
    limit = str(2 * files[0].stat().st_size + 100_000)
    copies = []
    for one in files[:2]:
        copies.append(Path(command("stage", one, disk).stdout.splitlines()[-1]))
        age(copies[-1])
    command("stage", files[0], disk)  # used again
    age(copies[0], OLD / 2)
    done = command("stage", files[2], disk, "--limit", limit)
    assert done.returncode == 0, done.stderr
    assert copies[0].exists() and not copies[1].exists()
    assert not request.record_path(copies[1]).exists()


def test_other_files_are_neither_removed_nor_counted(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    copy = Path(command("stage", file, disk).stdout.splitlines()[-1])
    others = [
        folder / name
        for folder in (disk, own(disk))
        for name in ("mine.sqsh", ".mine.sqsh", f"{copy.stem}-2.sqsh", f"{copy.stem[1:]}.sqsh")
    ]
    for one in others:
        shutil.copy(file, one)
        request.record_path(one).write_text("{}")
        age(one, 2 * OLD)
    (own(disk) / "folder.sqsh").mkdir()
    age(copy)
    limit = file.stat().st_size + 1000
    done = command("stage", packed(tmp_path, "b"), disk, "--limit", str(limit))
    assert done.returncode == 0, done.stderr
    assert not copy.exists()
    assert all(one.exists() and request.record_path(one).exists() for one in others)


def test_one_that_may_be_about_to_start_stays(file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    copy = Path(command("stage", file, disk).stdout.splitlines()[-1])
    other = packed(tmp_path, "b")
    done = command("stage", other, disk, "--limit", str(file.stat().st_size + 1000))
    assert done.returncode == 3
    assert "STAGE_LIMIT" in done.stderr and str(disk) in done.stderr
    assert copy.exists()


def test_a_killed_copy_leaves_nothing_for_long(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    own(disk).mkdir(parents=True)
    left = own(disk) / f".{staging.Identity.of(file).name}.sqsh.99999.tmp"
    left.write_bytes(b"half")
    assert command("stage", file, disk).returncode == 0
    assert not left.exists()


def test_no_squash_file(tmp_path: Path) -> None:
    assert command("stage", tmp_path / "no.sqsh", tmp_path / "disk").returncode == 2
    done = command("stage", tmp_path / "no.sqsh", tmp_path / "disk", "--look")
    assert done.returncode == 2 and "no.sqsh" in done.stderr
