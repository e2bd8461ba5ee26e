"""Copies of checkpoints in memory are used if, and only if, they equal the checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.support.disks import small_disk
from training import manifest
from training.checkpoint.free_memory import free_in, free_memory, is_tmpfs, roomiest
from training.checkpoint.in_memory import NOTE, Copies, Sources
from training.checkpoint.memory_choice import NO_AGENT, NO_TMPFS, Room, choose
from training.checkpoint.memory_folder import PREFIX, VARIABLE, MemoryFolder, leftovers
from training.errors import RequestError
from training.manifest import File, Manifest
from training.process_group import Group

GIB = 1 << 30
MEMORY = Path("/dev/shm")


def group(rank: int = 0, ranks: int = 2, local: int = 2) -> Group:
    return Group(rank, ranks, local, torch.device("cpu"), control=None)


def copies(folder: Path, rank: int = 0, job: str = "7.0", local: int = 2) -> Copies:
    return Copies(folder, job, group(rank, local=local), most=GIB)


def save(folder: Path, memory: Path, step: int = 4, local: int = 2) -> tuple[Path, Manifest]:
    """Write a checkpoint of two ranks, which keep copies of it."""
    unfinished = manifest.temporary(str(folder), step)
    unfinished.mkdir(parents=True)
    memory.mkdir(exist_ok=True)
    names = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for number, name in enumerate(names):
        (unfinished / name).write_bytes(bytes([step, number]) * 3_000_000)
    files: dict[str, File] = {}
    final = unfinished.with_name(f"step_{step}_ckp")
    for rank in (0, 1):
        mine, own = copies(memory, rank, local=local), manifest.share(names, rank, 2)
        taken = mine.take(unfinished, final, own, names)
        assert taken.fault == ""
        files |= taken.files
        mine.keep(final.name)
    record = Manifest(
        step=step, tokens_seen=1, world_size=2, model={}, data={}, torch="2", files=files
    )
    manifest.publish(unfinished, record)
    assert not manifest.rotten(final, record)
    return final, record


def test_what_is_kept_is_what_was_written(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    path, record = save(tmp_path / "run", memory)
    held = [copies(memory, rank).look(path, record) for rank in (0, 1)]
    assert [one.names for one in held] == [(".metadata", "__0_0.distcp"), ("__1_0.distcp",)]
    for number, one in enumerate(held):
        assert one.why_not == ""
        for name in one.names:
            assert (Path(one.folder) / name).read_bytes() == (path / name).read_bytes()
            assert (Path(one.folder) / name).stat().st_mode & 0o077 == 0
        assert Path(one.folder).stat().st_mode & 0o777 == 0o700
        assert Sources.of(held, number).here.keys() == record.files.keys()


def test_nodes_keep_what_their_ranks_wrote_and_the_list_of_all(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    path, record = save(tmp_path / "run", memory, local=1)
    held = [copies(memory, rank, local=1).look(path, record) for rank in (0, 1)]
    assert [one.names for one in held] == [
        (".metadata", "__0_0.distcp"),
        ("__1_0.distcp", ".metadata"),
    ]
    apart = [held[0], replace(held[1], node="another")]
    sources = Sources.of(apart, 1)
    assert sources.here.keys() == {"__1_0.distcp", ".metadata"}
    assert sources.holders == {".metadata": 0, "__0_0.distcp": 0, "__1_0.distcp": 1}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1_000_000] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, 1_000_000)


def note_of(change: dict[str, Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        note = file.with_name(NOTE)
        note.write_text(json.dumps(json.loads(note.read_text()) | change))

    return damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "the copy of __1_0.distcp has another checksum"),
        (cut, "the copy of __1_0.distcp has another checksum"),
        (Path.unlink, "the copy of __1_0.distcp cannot be read: No such file or directory"),
        (lambda file: file.with_name(NOTE).unlink(), "the copy of step_4_ckp was not finished"),
        (lambda file: file.with_name(NOTE).write_text('{"jo'), "note.json cannot be read"),
        (lambda file: file.with_name(NOTE).write_text("{}"), "note.json cannot be read"),
        (lambda file: shutil.rmtree(file.parents[1]), "no copy of step_4_ckp"),
        (note_of({"job": "6.2"}), "the copy is of job 6.2"),
        (note_of({"ranks": 4}), "the copy is of 4 ranks, the checkpoint of 2"),
        (note_of({"checkpoint": "/other/step_4_ckp"}), "the copy is of /other/step_4_ckp"),
    ],
)
def test_a_copy_that_is_not_the_checkpoint_is_not_used(
    tmp_path: Path, damage: Callable[[Path], Any], why: str
) -> None:
    memory = tmp_path / "memory"
    path, record = save(tmp_path / "run", memory)
    damage(memory / "rank_1" / "step_4_ckp" / "__1_0.distcp")
    held = copies(memory, 1).look(path, record)
    assert held.names == () and why in held.why_not
    assert copies(memory, 0).look(path, record).why_not == ""


def test_only_the_newest_is_kept_and_an_older_one_never_used(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    save(tmp_path / "run", memory, 4)
    save(tmp_path / "run", memory, 8)
    assert [one.name for one in (memory / "rank_1").iterdir()] == ["step_8_ckp"]
    shutil.move(memory, tmp_path / "before")
    newer, record = save(tmp_path / "run", memory, 12)
    held = copies(tmp_path / "before", 1).look(newer, record)
    assert held.names == ()
    assert held.why_not == "no copy of step_12_ckp, only of step_8_ckp"


def test_copies_of_ranks_that_are_on_another_node_now_go(tmp_path: Path) -> None:
    """A node's ranks get other numbers: copies stay while a restart may bring the old ones back."""
    memory = tmp_path / "memory"
    path, record = save(tmp_path / "run", memory)

    def shifted(rank: int) -> Copies:
        return Copies(memory, "7.0", group(rank, ranks=4), most=GIB)

    def kept() -> set[str]:
        return {str(one.relative_to(memory)) for one in memory.glob("rank_*/*")}

    (memory / "rank_1" / "step_8_ckp").mkdir()  # from a save that another node did not survive
    shifted(3).keep(path.name)
    assert "rank_1/step_8_ckp" in kept(), "the first rank of a node does it"
    shifted(2).keep(path.name)
    assert kept() == {"rank_0/step_4_ckp", "rank_1/step_4_ckp"}
    assert copies(memory, 1).look(path, record).why_not == "", "their own numbers again"
    (memory / "rank_3" / "step_12_ckp").mkdir(parents=True)
    shifted(2).keep("step_12_ckp")
    assert kept() == {"rank_3/step_12_ckp"}
    assert {one.name for one in memory.iterdir()} == {"rank_3"}


def test_a_step_that_was_written_again_is_another_checkpoint(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    path, record = save(tmp_path / "run", memory)
    files = {name: replace(file, crc32=1) for name, file in record.files.items()}
    held = copies(memory, 1).look(path, replace(record, files=files))
    assert held.why_not == "__1_0.distcp was written again since"
    sizes = {name: File(file.size) for name, file in record.files.items()}  # of format 1
    held = copies(memory, 1).look(path, replace(record, files=sizes))
    assert held.names == () and "has no checksum" in held.why_not


def test_copies_are_bounded(tmp_path: Path) -> None:
    unfinished = manifest.temporary(str(tmp_path), 4)
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(bytes(1_000_000))
    mine = Copies(tmp_path / "memory", "7.0", group(ranks=1, local=1), most=1_900_000)
    (tmp_path / "memory").mkdir()
    final = unfinished.with_name("step_4_ckp")
    taken = mine.take(unfinished, final, ["__0_0.distcp"], ["__0_0.distcp"])
    assert taken.fault == "2.0 MB for two copies are more than the 1.9 MB allowed"
    assert taken.files == {"__0_0.distcp": File.of(unfinished / "__0_0.distcp")}
    assert not list((tmp_path / "memory").iterdir())


FULL = """
import sys, torch
from pathlib import Path
from training.checkpoint import in_memory
from training.process_group import Group

in_memory.free_in = lambda folder: 1 << 40  # another job takes the rest just after this look
memory, disk = map(Path, sys.argv[1:])
copies = in_memory.Copies(memory, "7.0", Group(0, 1, 1, torch.device("cpu"), None), 1 << 40)
taken = copies.take(disk, disk.with_name("step_4_ckp"), ["__0_0.distcp"], ["__0_0.distcp"])
print(taken.fault, taken.files["__0_0.distcp"].size, list((memory / "rank_0").iterdir()))
copies.note_faults("step_4_ckp", {0: taken.fault})
print(copies.take_warning())
copies.note_faults("step_8_ckp", {0: taken.fault})
print(copies.take_warning() or "nothing more")
"""


@pytest.mark.processes
def test_a_tmpfs_that_is_full_in_the_middle_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FULL)
    written = tmp_path / "step_4_ckp.tmp"
    written.mkdir()
    (written / "__0_0.distcp").write_bytes(os.urandom(9_000_000))
    with small_disk(tmp_path / "memory", "5m") as disk:
        done = disk.run([sys.executable, f"{tmp_path}/full.py", f"{disk.path}", f"{written}"])
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "No space left on device 9000000 []"
    assert second == (
        f"checkpoint_in_memory: no copy of step_4_ckp is kept by rank 0 in {disk.path}: "
        "No space left on device; a restart reads it from disk"
    )
    assert third == "nothing more"


# Whether copies are kept, and where.


def test_the_choice() -> None:
    rooms = [Room("/dev/shm/one", free=100 * GIB), Room("/dev/shm/two", free=40 * GIB)]
    chosen = choose(None, 5 * GIB, rooms)
    assert chosen.on and chosen.most == 10 * GIB
    assert chosen.why == "two copies take 10.7 GB of the 42.9 GB that a node has free in /dev/shm"
    short = choose(None, 6 * GIB, rooms)
    assert not short.on and short.why == (
        "two copies of a node's part of a checkpoint take 12.9 GB, more than a quarter of the "
        "42.9 GB that the node of rank 1 has free in /dev/shm"
    )
    assert choose(True, 6 * GIB, rooms).on
    with pytest.raises(RequestError, match=r"more than half of .* fix: give the job more memory"):
        choose(True, 11 * GIB, rooms)
    assert choose(None, 1, [Room("", NO_AGENT)]).why == NO_AGENT
    assert choose(None, 1, [rooms[0], Room("", NO_TMPFS)]).why.endswith("on the node of rank 1")
    with pytest.raises(RequestError, match="fix: start the run by a launcher"):
        choose(True, 1, [Room("", NO_AGENT)])
    fewer = choose(True, 11 * GIB, rooms, refuses=False)
    assert not fewer.on and "more than half of" in fewer.why


def test_free_memory_is_what_the_nearest_limit_leaves(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemAvailable:    8000000 kB\n",
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": "1 2 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
        "sys/fs/cgroup/job/memory.max": "3000000000\n",
        "sys/fs/cgroup/job/memory.current": "2500000000\n",
        "sys/fs/cgroup/job/memory.stat": "inactive_file 100000000\nactive_file 1\nshmem 5\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == 600_000_001
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert free_memory(tmp_path) == 8_192_000_000
    assert free_memory(tmp_path / "nothing") == 0


def test_memory_that_others_give_back_meanwhile_does_not_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(1, 9))
    monkeypatch.setattr("training.checkpoint.free_memory.free_memory", lambda _: next(free))
    assert roomiest([tmp_path, MEMORY]) == tmp_path
    assert roomiest([MEMORY, tmp_path]) == MEMORY


@pytest.mark.processes
def test_of_two_tmpfs_the_one_with_more_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a", "1m") as small, small_disk(tmp_path / "b", "2m") as large:
        assert roomiest([small.seen, large.seen]) == large.seen


@pytest.fixture
def tmpfs(tmp_path: Path) -> Path:
    if not is_tmpfs(MEMORY):
        pytest.skip("/dev/shm is no tmpfs here")
    assert free_in(MEMORY) > 0
    assert not is_tmpfs(Path("/proc"))
    return MEMORY


HOLDS = """
import os, sys
from pathlib import Path
from training.checkpoint.memory_folder import MemoryFolder

environment = {}
MemoryFolder("7.0", environment, [Path(sys.argv[1])]).make()
print(environment["CHECKPOINT_MEMORY"], flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_what_a_killed_job_has_left_goes_and_what_a_living_one_has_stays(tmpfs: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmpfs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    environment: dict[str, str] = {}
    mine = MemoryFolder("8.1", environment, [tmpfs])
    try:
        assert holder.stdout is not None
        other = Path(holder.stdout.readline().strip())
        assert other.name.startswith(f"{PREFIX}7.0-") and other.stat().st_mode & 0o777 == 0o700
        (other / "rank_0").mkdir()
        (other / "rank_0" / "file").write_bytes(b"x")
        mine.make()
        assert mine.path is not None and environment[VARIABLE] == str(mine.path)
        assert other.is_dir()
        holder.kill()
        holder.communicate()
        assert other.is_dir() and other in list(leftovers(tmpfs))
        again = MemoryFolder("9.0", {}, [tmpfs], wanted=False)
        again.make()
        assert not other.exists() and again.path is None and mine.path.is_dir()
    finally:
        holder.kill()
        holder.communicate()
        made = mine.path
        mine.remove()
    assert made is not None and not made.exists() and VARIABLE not in environment


def test_without_a_tmpfs_ranks_say_so(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    MemoryFolder("8.1", environment, [Path("/proc"), tmp_path / "nothing"]).make()
    assert environment == {VARIABLE: ""}
