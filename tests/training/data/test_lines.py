"""JSON lines: crops, padding, the converted form, kills, several processes, and bad lines."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mounts import mounting
from tests.training.support.runs import TINY, command
from training.data import lines
from training.data.lines import Converted, Lines
from training.errors import RequestError, TrainingError

ROOT = Path(__file__).parents[3]


def line(ids: list[int], mask: list[int] | None = None) -> str:
    return json.dumps({"input_ids": ids, "attention_mask": mask or [1] * len(ids)})


def save(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{text}\n" for text in texts).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of five lines; the ids identify the line."""
    data = tmp_path / "data"
    save(data / "b.json.gz", line(list(range(300, 310))), "", line([400, 401]))
    save(data / "a.json", line(list(range(100, 105))), line(list(range(200, 204))))
    save(data / "c.json", line([500]))
    save(data / "ignored.txt", "no JSON")
    return data


def every(samples: Lines) -> list[tuple[list[int], list[int]]]:
    rows = [samples[index] for index in range(len(samples))]
    return [(row.inputs.tolist(), row.targets.tolist()) for row in rows]


def noting(made: list[str]) -> Callable[[Path, Path], Converted]:
    """Convert files, and record which."""
    convert = lines._convert

    def noted(path: Path, place: Path) -> Converted:
        made.append(path.name)
        return convert(path, place)

    return noted


def test_lines_of_all_lengths(folder: Path) -> None:
    samples = Lines(folder, 4, seed=0)
    assert len(samples) == 5 and samples.vocab_size == 501
    assert samples.described() == "22 tokens in 5 lines of 3 files"
    whole, exact, long, short, single = every(samples)
    assert whole == ([100, 101, 102, 103], [101, 102, 103, 104]), "l + 1 tokens"
    assert exact == ([200, 201, 202, 203], [201, 202, 203, -100]), "l tokens: nothing follows"
    begin = long[0][0]
    assert long == (list(range(begin, begin + 4)), list(range(begin + 1, begin + 5)))
    assert short == ([400, 401, 0, 0], [401, -100, -100, -100])
    assert single == ([500, 0, 0, 0], [-100] * 4)
    assert samples[0].inputs.dtype == samples[0].targets.dtype == torch.int64
    assert samples[0].weights is None
    for index in (-1, 5):
        with pytest.raises(IndexError):
            samples[index]


@pytest.mark.parametrize(("pattern", "count"), [("*.json.gz", 2), ("*.json", 3), ("[ab].json*", 4)])
def test_a_pattern_says_which_files(folder: Path, pattern: str, count: int) -> None:
    assert len(Lines(folder / pattern, 4, seed=0)) == count
    assert (folder / ".lines").is_dir()


def test_a_pattern_that_means_no_file_is_reported(folder: Path) -> None:
    with pytest.raises(
        RequestError, match=r"has no d\*\.json files, but \*\.json; fix: write lines:/"
    ):
        Lines(folder / "d*.json", 4, seed=0)


def test_crops_are_a_function_of_number_and_seed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    save(data / "a.json", *[line(list(range(10)))] * 300)
    begins = [row[0][0] for row in every(Lines(data, 3, seed=0))]
    assert set(begins) == set(range(7)), "every place where l + 1 tokens are left"
    assert begins == [row[0][0] for row in every(Lines(data, 3, seed=0))]
    other = Lines(data, 3, seed=1)
    assert begins != [row[0][0] for row in every(other)]
    assert other.fingerprint != Lines(data, 3, seed=0).fingerprint


def test_padding_does_not_count(tmp_path: Path) -> None:
    data = tmp_path / "data"
    save(
        data / "a.json",
        line([5, 6, 7, 0, 0], [1, 1, 1, 0, 0]),
        line([9, 9, 5, 6, 7], [0, 0, 1, 1, 1]),
        line([3, 3, 3], [0, 0, 0]),
    )
    right, left, none = every(Lines(data, 5, seed=0))
    assert right == ([5, 6, 7, 0, 0], [6, 7, -100, -100, -100])
    assert left == ([9, 9, 5, 6, 7], [-100, -100, 6, 7, -100]), "nor what is said after padding"
    assert none == ([3, 3, 3, 0, 0], [-100] * 5)


def test_what_is_converted_is_read_again_and_what_changes_is_converted_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = Lines(folder, 4, seed=0, cache=cache)
    rows = every(first)
    assert not (folder / ".lines").exists()
    converted: list[str] = []
    monkeypatch.setattr(lines, "_convert", noting(converted))
    assert every(Lines(folder, 4, seed=0, cache=cache)) == rows and converted == []
    save(folder / "a.json", line([1, 2, 3]))
    changed = Lines(folder, 4, seed=0, cache=cache)
    assert converted == ["a.json"]
    rows = every(changed)
    assert rows[0] == ([1, 2, 3, 0], [2, 3, -100, -100])
    assert changed.fingerprint != first.fingerprint
    for part in cache.glob("b.json.gz.*"):
        part.write_bytes(part.read_bytes()[:-1])  # as on a broken disk
    assert every(Lines(folder, 4, seed=0, cache=cache)) == rows
    assert converted == ["a.json", "b.json.gz"]


def test_a_whole_cache_needs_no_right_to_write(folder: Path) -> None:
    rows = every(Lines(folder, 4, seed=0))
    for path in (folder / ".lines").glob(".*.lock"):
        path.unlink()
    again = Lines(folder, 4, seed=0)
    assert every(again) == rows
    assert not list((folder / ".lines").glob(".*"))


@pytest.mark.processes
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("before", ["", "ab"])
def test_data_that_is_read_only_is_converted_in_data_cache(
    folder: Path, tmp_path: Path, has_cache: bool, before: str
) -> None:
    if before:
        Lines(folder, 4, seed=0)
        for path in (folder / ".lines").glob("c.json*"):
            path.unlink()
    read_only = (
        f"mount --bind {folder} {folder} && mount -o remount,bind,ro,nosuid,nodev {folder}"
        ' && exec "$0" "$@"'
    )
    cache = (f"--data_cache={tmp_path}/cache",) if has_cache else ()
    flags = (f"--dataset_path=lines:{folder}", f"--save_ckpt_path={tmp_path}/run", *cache)
    asked = command(0, *TINY, "--vocab_size=512", "--batch_size=2", "--num_steps=1", *flags)
    done = subprocess.run(
        [*mounting(), "sh", "-ec", read_only, *asked],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if has_cache:
        assert done.returncode == 0, done.stderr
        there = (tmp_path / "cache").glob(".lines-*/[abc].json*")
        assert sorted(path.name[0] for path in there) == [*("c" if before else "abc")]
    else:
        why = (
            "cannot be written; fix: set data_cache to another folder"
            if before
            else "Read-only file system; "
        )
        assert done.returncode == 2 and why in done.stderr


@pytest.mark.processes
def test_several_processes_make_one_cache(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    for number in range(6):
        rows = [line(list(range(number, number + 200))) for _ in range(150)]
        save(data / f"{number}.json", *rows)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def work() -> None:
        made: list[str] = []
        lines._convert = noting(made)  # type: ignore[assignment]
        samples = Lines(data, 16, seed=0, cache=cache)
        queue.put((made, samples.fingerprint, every(samples)))

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    shown = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    made = sorted(name for made, *_ in shown for name in made)
    assert made == [f"{number}.json" for number in range(6)], "each is converted once"
    assert shown[0][1:] == shown[1][1:] == shown[2][1:]
    assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == 6
    assert not list(cache.glob(".*.partial"))


def test_without_locks_the_same_comes_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = every(Lines(folder, 4, seed=0, cache=folder / "one"))

    def flock(*_: Any) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(lines.fcntl, "flock", flock)
    assert every(Lines(folder, 4, seed=0, cache=folder / "two")) == rows


@pytest.mark.processes
def test_a_killed_conversion_goes_on(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    save(data / "a.json", *[line([1, 2, 3])] * 3)
    save(data / "b.json", *[line([4, 5, 6])] * 3)
    pipe = data / "c.json"
    os.mkfifo(pipe)  # it acts as a slow file, but is not a regular one
    program = (
        "import sys; from pathlib import Path; from training.data.lines import converted; "
        "converted([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))"
    )
    names = [str(data / name) for name in ("a.json", "c.json", "b.json")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(cache), *names],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        with pipe.open("wb") as file:  # waits until the reader has opened it
            file.write(line([7]).encode() + b"\n")
            file.flush()
            assert list(cache.glob(".c.json.*.partial"))
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    (done,) = [path for path in cache.iterdir() if not path.name.startswith(".")]
    assert done.name.startswith("a.json.")
    before = done.stat().st_mtime_ns
    pipe.unlink()
    save(pipe, line([7, 8]))
    (left,) = cache.glob(".c.json.*.partial")
    long_ago = time.time() - 2 * lines.ABANDONED
    os.utime(left, (long_ago, long_ago))
    samples = Lines(data, 2, seed=0, cache=cache)
    assert len(samples) == 7 and samples[6].targets.tolist() == [8, -100]
    assert done.stat().st_mtime_ns == before
    assert not list(cache.glob(".*.partial"))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("{", "is not JSON: "),
        ("[1, 2]", "is not a JSON object"),
        ('{"input_ids": [1]}', "has no attention_mask"),
        ('{"attention_mask": [1]}', "has no input_ids"),
        ('{"text": "words"}', "has no input_ids; .*; fix: read texts by stream:FOLDER, or token"),
        ('{"input_ids": [], "attention_mask": []}', "input_ids is not a list, or is empty"),
        ('{"input_ids": "12", "attention_mask": [1]}', "input_ids is not a list"),
        ('{"input_ids": [1.0], "attention_mask": [1]}', "input_ids is not a list of integers"),
        ('{"input_ids": [[1]], "attention_mask": [1]}', "input_ids is not a list of integers"),
        ('{"input_ids": [1, [2]], "attention_mask": [1]}', "input_ids is not a list of integers"),
        ('{"input_ids": [true], "attention_mask": [1]}', "input_ids is not a list of integers"),
        ('{"input_ids": [1e99], "attention_mask": [1]}', "input_ids is not a list of integers"),
        (
            f'{{"input_ids": [{2**70}], "attention_mask": [1]}}',
            "input_ids is not a list of integers",
        ),
        (line([1, 2], [1]), r"has 2 input_ids, but an attention_mask of 1; fix: make both"),
        (line([1, -1]), "the id -1 is not from 0 to 2,147,483,647"),
        (line([1, 2**31]), "the id 2,147,483,648 is not from 0"),
        (line([1, 2], [1, 2]), "attention_mask has numbers other than 0 and 1"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "{", "is not JSON"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_bad_lines_are_reported_by_file_and_number(
    tmp_path: Path, name: str, bad: str, match: str
) -> None:
    save(tmp_path / name, line([1, 2]), "", bad, line([3]))
    with pytest.raises(RequestError, match=rf"{name}: line 3: .*{match}") as shown:
        Lines(tmp_path, 4, seed=0)
    assert "\n" not in str(shown.value)
    assert not [path for path in (tmp_path / ".lines").iterdir() if path.suffix != ".lock"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = save(tmp_path / "cut" / "a.json.gz", *[line(list(range(i, i + 99))) for i in range(99)])
    whole.write_bytes(whole.read_bytes()[:-500])
    with pytest.raises(RequestError, match=r"a\.json\.gz: cannot be read after line \d+: "):
        Lines(whole.parent, 4, seed=0)
    plain = tmp_path / "plain" / "a.json.gz"
    plain.parent.mkdir()
    plain.write_text(line([1]))
    with pytest.raises(RequestError, match=r"a\.json\.gz: cannot be read after line 0: Not a gzip"):
        Lines(plain.parent, 4, seed=0)


def test_folders_without_data(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no \*\.json or \*\.json\.gz files"):
        Lines(tmp_path, 4, seed=0)
    with pytest.raises(RequestError, match="none: has no"):
        Lines(tmp_path / "none", 4, seed=0)
    save(tmp_path / "a.json", "")
    with pytest.raises(RequestError, match="its files have no lines"):
        Lines(tmp_path, 4, seed=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RequestError, match=r"cannot be made: .*; fix: set data_cache to another folder"
    ):
        Lines(tmp_path, 4, seed=0, cache=tmp_path / "file" / "cache")


def test_a_file_that_changes_while_it_is_converted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = lines._parsed

    def slow(path: Path) -> Any:
        yield from parsed(path)
        save(path, line([1]))

    monkeypatch.setattr(lines, "_parsed", slow)
    with pytest.raises(TrainingError, match=r"a\.json: changed while it was read"):
        Lines(folder, 4, seed=0)
