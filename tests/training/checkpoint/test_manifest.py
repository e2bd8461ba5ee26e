"""A checkpoint is complete or absent."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from training import manifest
from training.errors import RequestError
from training.manifest import File, Manifest


def make(save: Path, step: int) -> Path:
    folder = manifest.temporary(str(save), step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights")
    (folder / ".metadata").write_bytes(b"index")
    files = {path.name: File.of(path) for path in folder.iterdir()}
    shown = Manifest(
        step=step, tokens_seen=9, world_size=1, model={}, data={}, torch="2", files=files
    )
    return manifest.publish(folder, shown)


def rename_in(path: Path, name: str) -> None:
    path.write_text(path.read_text().replace("__0_0.distcp", name))


@pytest.fixture
def shown() -> list[str]:
    return []


def newest(save: Path, shown: list[str]) -> Any:
    found = manifest.newest(manifest.checkpoints(str(save)), shown.append)
    return found and found[1].step


def test_the_newest_is_found_by_number(tmp_path: Path, shown: list[str]) -> None:
    assert newest(tmp_path, shown) is None
    for step in (9, 100, 20):
        make(tmp_path, step)
    assert newest(tmp_path, shown) == 100 and shown == []


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"st'), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing, should have 7"),
        (lambda path: (path / ".metadata").write_bytes(b"in"), ".metadata has 2 bytes, should"),
        (lambda path: rename_in(path / "manifest.json", "x" * 300), "cannot be read: File name"),
    ],
)
def test_a_broken_one_is_passed_over_loudly(
    tmp_path: Path, shown: list[str], damage: Any, fault: str
) -> None:
    make(tmp_path, 10)
    damage(make(tmp_path, 20))
    assert newest(tmp_path, shown) == 10
    assert len(shown) == 1 and "WARNING" in shown[0] and "step_20_ckp" in shown[0]
    assert fault in shown[0]


def test_another_format_is_not_guessed(tmp_path: Path, shown: list[str]) -> None:
    path = make(tmp_path, 10) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    assert newest(tmp_path, shown) is None and "format 3" in shown[0]


def test_the_first_format_is_read_by_its_sizes(tmp_path: Path, shown: list[str]) -> None:
    path = make(tmp_path, 10) / "manifest.json"
    record = json.loads(path.read_text())
    sizes = {name: file["size"] for name, file in record["files"].items()}
    path.write_text(json.dumps({**record, "files": sizes, "format": 1}))
    assert newest(tmp_path, shown) == 10 and shown == []
    found, _ = manifest.read(path.parent)
    assert found is not None and not manifest.rotten(path.parent, found)
    (path.parent / "__0_0.distcp").write_bytes(b"weigh")
    assert newest(tmp_path, shown) is None and "has 5 bytes, should have 7" in shown[0]


def test_other_bytes_of_the_same_number_are_found_by_the_rank_that_looks(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    (path / "__0_0.distcp").write_bytes(b"wejghts")
    found, fault = manifest.read(path)
    assert found is not None and fault == ""
    fault = "__0_0.distcp is not what was written: its checksum differs"
    assert manifest.rotten(path, found) == fault
    assert manifest.rotten(path, found, [".metadata"]) == ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_file_is_looked_at_by_one_rank(ranks: int) -> None:
    names = [".metadata", *(f"__{rank}_{i}.distcp" for rank in range(12) for i in range(2))]
    shares = [manifest.share(names, rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert ".metadata" in shares[0] and "__11_1.distcp" in shares[11 % ranks]


def test_unfinished_ones_are_never_found_and_cleared_at_the_start(
    tmp_path: Path, shown: list[str]
) -> None:
    folder = manifest.temporary(str(tmp_path), 30)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert newest(tmp_path, shown) is None and shown == []
    manifest.prepare(str(tmp_path))
    assert list(manifest.checkpoints(str(tmp_path)).iterdir()) == []


def test_a_broken_one_is_replaced_by_the_run_that_reaches_its_step(
    tmp_path: Path, shown: list[str]
) -> None:
    (make(tmp_path, 10) / "manifest.json").unlink()
    make(tmp_path, 10)
    assert newest(tmp_path, shown) == 10


def test_retention_keeps_the_newest(tmp_path: Path, shown: list[str]) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    folder = manifest.checkpoints(str(tmp_path))
    manifest.retain(folder, 0)
    assert len(list(folder.iterdir())) == 3
    manifest.retain(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_20_ckp", "step_30_ckp"]


def test_old_ones_of_every_so_many_steps_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    folder = manifest.checkpoints(str(tmp_path))
    manifest.retain(folder, 2, 20)
    kept = sorted(int(path.name.split("_")[1]) for path in folder.iterdir())
    assert kept == [20, 40, 50]


def test_the_link_to_one_that_was_moved_is_removed_and_what_it_leads_to_stays(
    tmp_path: Path,
) -> None:
    moved = make(tmp_path, 10).rename(tmp_path / "archive")
    folder = manifest.checkpoints(str(tmp_path))
    (folder / "step_10_ckp").symlink_to(moved)
    make(tmp_path, 20)
    assert manifest.retain(folder, 1) == []
    assert [path.name for path in folder.iterdir()] == ["step_20_ckp"]
    assert manifest.read(moved)[0]


def test_one_that_cannot_be_removed_is_reported_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, another user has written into it; a run may reach its step again."""
    for step in (10, 20):
        make(tmp_path, step)
    folder = manifest.checkpoints(str(tmp_path))

    def fails(path: Path, *given: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        fault = f"{folder}/step_10_ckp.tmp cannot be removed: Permission denied"
        assert manifest.retain(folder, 1) == [fault]
        assert manifest.retain(folder, 1) == []
        manifest.make_anew(manifest.temporary(str(tmp_path), 10))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "remove", lambda path: f"{path} cannot be removed: it is held")
        assert len(manifest.prepare(str(tmp_path))) == 2
    assert manifest.prepare(str(tmp_path)) == []
    assert [path.name for path in folder.iterdir()] == ["step_20_ckp"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RequestError, match=r"save_ckpt_path: .*file/checkpoints cannot be written"):
        manifest.prepare(str(tmp_path / "file"))


def test_a_checkpoint_may_be_named_itself(tmp_path: Path) -> None:
    for step in (9, 20):
        make(tmp_path, step)
    first, last = (manifest.checkpoints(str(tmp_path)) / f"step_{step}_ckp" for step in (9, 20))
    assert manifest.candidates(str(tmp_path)) == [(20, last), (9, first)]
    assert manifest.candidates(f"{tmp_path}/checkpoints/") == [(20, last), (9, first)]
    assert manifest.candidates(str(first)) == [(9, first)]
    assert manifest.candidates(f"{tmp_path}/checkpoints/step_7_ckp") == []
    assert manifest.candidates(str(tmp_path / "nowhere")) == []
