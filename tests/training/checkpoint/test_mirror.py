"""Checkpoints and data at URLs; file:// stands in for s3://, through the same library."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.checkpoint.test_manifest import make
from tests.training.checkpoint.test_survive_broken import flip_a_bit
from tests.training.support.runs import losses, run, steps
from training import manifest
from training.checkpoint.mirror import Mirror, check
from training.config.sections import RunConfig
from training.entrypoint import renamed
from training.errors import RequestError, TrainingError
from training.llama_smp import configure
from training.process_group import Group
from training.systems.smp.flags import names_for

pytestmark = pytest.mark.processes

ENTRY_POINT = ("-m", "training.llama_smp")
MODEL = (
    *("--model_type=llama_v2", "--hidden_width=64", "--num_layers=2", "--num_heads=4"),
    *("--intermediate_size=96", "--vocab_size=64", "--max_context_width=32", "--lr=3e-3"),
    *("--lr_decay_iters=100", "--checkpoint_freq=2", "--num_kept_checkpoints=2"),
)


def write_lines(folder: Path, count: int) -> None:
    folder.mkdir()
    rows = [[(start + place) % 64 for place in range(40)] for start in range(count)]
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * 40}) for row in rows]
    (folder / "a.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "b.json").write_text("not read")


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_run_goes_on_where_nothing_but_the_url_is_left(tmp_path: Path) -> None:
    """Two ranks; both places have the same, and a run that lost its folder ends the same."""
    write_lines(tmp_path / "train", 60)
    write_lines(tmp_path / "test", 8)
    there, here = tmp_path / "bucket" / "run", tmp_path / "scratch"
    remote = (
        *(*MODEL, f"--training_dir=file://{tmp_path}/train", f"--test_dir=file://{tmp_path}/test"),
        *(f"--data_cache={tmp_path}/cache", "--validation_freq=100"),
        *(f"--checkpoint_dir=file://{there}", f"--checkpoint_scratch={here}"),
    )
    first = run(2, *remote, "--max_steps=6", program=ENTRY_POINT)
    assert first.returncode == 0, first.stderr
    assert f"copying file://{tmp_path}/train/*.json.gz" in first.stdout
    copied = [path.name for path in (tmp_path / "cache").glob("*/*") if path.is_file()]
    assert copied == ["a.json.gz", "a.json.gz"], "of each folder, and nothing that is not read"
    kept = files(there / "checkpoints")
    assert kept == files(here / "checkpoints")
    assert {name.split("/")[0] for name in kept} == {"step_4_ckp", "step_6_ckp"}
    whole = losses(here)
    shutil.rmtree(here)
    # As if it had been killed while sending the last one: the manifest is sent last.
    (there / "checkpoints" / "step_6_ckp" / "manifest.json").unlink()
    again = run(2, *remote, "--max_steps=6", program=ENTRY_POINT)
    assert again.returncode == 0, again.stderr
    assert f"fetching file://{there}/checkpoints/step_4_ckp" in again.stdout
    assert "step_4_ckp at step 4" in again.stdout
    assert [line["step"] for line in steps(here)] == [1, 2, 3, 4, 5, 6], "its history is there too"
    assert losses(here) == whole
    assert files(there / "checkpoints") == files(here / "checkpoints")


class Alone(Group):
    """One rank, which need not agree with others."""

    def __init__(self) -> None:
        super().__init__(0, 1, 1, torch.device("cpu"), control=None)

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder that the URL refers to."""
    return tmp_path / "bucket"


def mirror(there: Path, scratch: Path, keep: int, every: int = 0) -> Mirror:
    return Mirror(
        RunConfig(
            save_ckpt_path=str(scratch),
            mirror_url=f"file://{there}",
            keep_checkpoints=keep,
            keep_every=every,
        )
    )


def complete(there: Path) -> list[int]:
    found = manifest.numbered(there / "checkpoints")
    return sorted(step for step, path in found if manifest.read(path)[0])


def push(there: Path, scratch: Path, *steps: int, keep: int, every: int = 0) -> None:
    for step in steps:
        mirror(there, scratch, keep, every).push(make(scratch, step), Alone(), pytest.fail)
        manifest.retain(scratch / "checkpoints", keep, every)


def test_a_start_on_an_empty_disk_removes_nothing_that_is_kept(there: Path, tmp_path: Path) -> None:
    push(there, tmp_path / "before", 100, 150, 200, 300, 320, 340, keep=2, every=100)
    assert complete(there) == [100, 200, 300, 320, 340]
    after = tmp_path / "after"
    mirror(there, after, 2, 100).pull(Alone(), lambda line: None)
    assert complete(after) == [340], "the newest alone is fetched"
    push(there, after, 360, keep=2, every=100)
    assert complete(there) == [100, 200, 300, 340, 360]


def test_what_a_killed_run_left_there_goes_and_counts_for_nothing(
    there: Path, tmp_path: Path
) -> None:
    push(there, tmp_path / "run", 2, 4, 6, keep=0)
    (there / "checkpoints" / "step_6_ckp" / "manifest.json").unlink()
    (there / "checkpoints" / "notes").mkdir()
    push(there, tmp_path / "run", 8, keep=2)
    assert complete(there) == [4, 8]
    names = {path.name for path in (there / "checkpoints").iterdir()}
    assert names == {"step_4_ckp", "step_8_ckp", "notes"}


def test_what_was_passed_over_as_broken_takes_no_place(there: Path, tmp_path: Path) -> None:
    """Their files turn out to be corrupt after they were fetched; the run resumes from before."""
    push(there, tmp_path / "run", 2, 4, 8, keep=0)
    push(there, tmp_path / "run", 6, keep=2)
    assert complete(there) == [4, 6]


def test_one_that_is_sent_again_is_not_complete_meanwhile(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    push(there, run, 2, 4, keep=2)

    def fails(self: Mirror, *given: Any) -> None:
        raise TrainingError("the network is gone")

    monkeypatch.setattr(Mirror, "_send", fails)
    with pytest.raises(TrainingError, match="gone"):
        push(there, run, 4, keep=2)
    assert complete(there) == [2]


def test_one_that_may_not_be_removed_there_is_a_warning(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the nodes may write to a bucket but not remove anything."""
    one = mirror(there, tmp_path / "run", 1)

    def fails(*given: Any, **named: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(one.fs, "rm_file", fails)
    warnings: list[str] = []
    for step in (2, 4):
        one.push(make(tmp_path / "run", step), Alone(), warnings.append)
    assert complete(there) == [2, 4]
    assert warnings == [f"file://{there} cannot be cleared: Access Denied"]


def test_a_broken_one_here_hides_none_there(there: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    push(there, run, 6, 9, keep=1)
    broken = run / "checkpoints" / "step_9_ckp" / "__0_0.distcp"
    broken.write_bytes(b"")
    shown: list[str] = []
    mirror(there, run, 1).pull(Alone(), shown.append)
    assert shown == [f"fetching file://{there}/checkpoints/step_9_ckp"]
    assert broken.read_bytes() == b"weights"
    shown.clear()
    mirror(there, run, 1).pull(Alone(), shown.append)
    assert shown == []


def test_the_newest_sound_one_there_is_fetched(there: Path, tmp_path: Path) -> None:
    """One with corrupt bytes, one without a file, and one without a valid manifest are skipped."""
    push(there, tmp_path / "before", 2, 4, 6, 8, keep=0)
    flip_a_bit(there / "checkpoints/step_8_ckp/__0_0.distcp")
    (there / "checkpoints/step_6_ckp/__0_0.distcp").unlink()
    (there / "checkpoints/step_4_ckp/manifest.json").write_text("[")
    shown: list[str] = []
    assert mirror(there, tmp_path / "after", 2).pull(Alone(), shown.append)
    assert complete(tmp_path / "after") == [2]
    assert [path.name for path in (tmp_path / "after/checkpoints").iterdir()] == ["step_2_ckp"]
    warnings = [line for line in shown if not line.startswith("fetching ")]
    assert len(warnings) == 3 and "step_8_ckp is broken (__0_0.distcp is not what" in warnings[0]
    assert "(__0_0.distcp is missing" in warnings[1] and "(its manifest.json cann" in warnings[2]
    flip_a_bit(there / "checkpoints/step_2_ckp/__0_0.distcp")
    with pytest.raises(TrainingError, match=f"none of the 4 checkpoints of file://{there} is soun"):
        mirror(there, tmp_path / "last", 2).pull(Alone(), shown.append)


def test_one_that_could_not_be_copied_is_copied_at_the_next_start(tmp_path: Path) -> None:
    """Even if nothing is left to train: the run is not done before it is copied."""
    there, here = tmp_path / "bucket", tmp_path / "scratch"
    given = (
        *(*MODEL, "--use_synthetic_data=1", f"--checkpoint_dir=file://{there}"),
        *(f"--checkpoint_scratch={here}", "--max_steps=2"),
    )
    in_the_way = there / "checkpoints" / "step_2_ckp"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    first = run(2, *given, program=ENTRY_POINT)
    assert first.returncode == 1 and f"cannot be copied to file://{there}" in first.stderr
    in_the_way.unlink()
    again = run(2, *given, program=ENTRY_POINT)
    assert again.returncode == 0, again.stderr
    assert f"copying {here}/checkpoints/step_2_ckp to file://{there}" in again.stdout
    assert files(there / "checkpoints") == files(here / "checkpoints")
    last = run(2, *given, program=ENTRY_POINT)
    assert last.returncode == 0 and "copying" not in last.stdout


def test_one_with_other_bytes_here_is_fetched_again(tmp_path: Path) -> None:
    """It has the same size, so only its checksum differs; the bad one is kept beside it."""
    there, here = tmp_path / "bucket", tmp_path / "scratch"
    given = (
        *(*MODEL, "--use_synthetic_data=1", f"--checkpoint_dir=file://{there}"),
        f"--checkpoint_scratch={here}",
    )
    first = run(0, *given, "--max_steps=4", program=ENTRY_POINT)
    assert first.returncode == 0, first.stderr
    name = "step_4_ckp"
    sound = files(there / "checkpoints" / name)
    flip_a_bit(here / "checkpoints" / name / "__0_0.distcp")
    again = run(0, *given, "--max_steps=5", program=ENTRY_POINT)
    assert again.returncode == 0, again.stderr
    assert f"fetching file://{there}/checkpoints/{name}" in again.stdout
    assert f"resumed from {here}/checkpoints/{name} at step 4" in again.stdout
    assert [line["step"] for line in steps(here)] == [1, 2, 3, 4, 5]
    assert files(here / "checkpoints" / name) == sound
    assert files(here / "checkpoints" / f"{name}.broken") != sound
    for place in (here, there):  # it is corrupt there too: the run resumes from before, and says so
        flip_a_bit(place / "checkpoints" / "step_5_ckp" / "__0_0.distcp")
    last = run(0, *given, "--max_steps=6", program=ENTRY_POINT)
    assert last.returncode == 0, last.stderr
    assert f"fetching file://{there}/checkpoints/step_5_ckp" in last.stdout
    assert f"resumed from {here}/checkpoints/{name} at step 4" in last.stdout


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--checkpoint_dir=nowhere://x/y",), "checkpoint_dir: nowhere://x/y cannot be reached"),
        (
            ("--training_dir=file:///nowhere", "--use_synthetic_data=0"),
            "training_dir: file:///nowhere/*.json.gz has no files",
        ),
    ],
)
def test_urls_that_lead_nowhere(tmp_path: Path, flags: tuple[str, ...], shown: str) -> None:
    given = (*MODEL, "--use_synthetic_data=1", f"--checkpoint_dir={tmp_path}", "--max_steps=1")
    done = run(0, *given, f"--data_cache={tmp_path}/cache", *flags, program=ENTRY_POINT)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {shown}")


def test_a_scratch_that_not_all_ranks_see_is_named(tmp_path: Path) -> None:
    """It may be the default one, which is local to each node."""
    given = ("--use_synthetic_data=1", f"--checkpoint_dir=file://{tmp_path}/there")
    config = configure(given)
    with pytest.raises(RequestError) as error:
        check(config.run, Alone())
    assert renamed(str(error.value), names_for(given)) == (
        f"checkpoint_scratch: {config.run.save_ckpt_path} is not seen by all ranks; fix: give a "
        f"folder that is, where checkpoints are written before they are copied to {given[1][17:]}"
    )


def test_where_a_url_is_not_taken() -> None:
    least = ("--use_synthetic_data=1", "--save_final_model=1")
    with pytest.raises(RequestError) as error:
        configure(
            (*least, "--resume_from_checkpoint=s3://a/b", "--model_dir=s3://a/c"),
        )
    assert "--resume_from_checkpoint: s3://a/b is a URL; fix: give a folder" in str(error.value)
    assert "--model_dir: s3://a/c is a URL; fix: give a folder" in str(error.value)
    with pytest.raises(RequestError, match="--checkpoint_scratch: has no effect unless"):
        configure((*least, "--checkpoint_scratch=/x"))
    run = configure((*least, "--checkpoint_dir=s3://bucket/run", "--checkpoint_scratch=/x")).run
    assert (run.mirror_url, run.save_ckpt_path) == ("s3://bucket/run", "/x")
    assert run.final_model_dir == "/x/model"
