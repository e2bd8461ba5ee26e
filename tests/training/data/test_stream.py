"""`stream:`: every document once per epoch, one order for any split of a step, exact resumption."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.web_servers import serving
from tests.training.support.runs import TINY, kill_tree, run, started, steps, train, wait_for
from training.config.config import Config, DataConfig, ModelConfig, RunConfig
from training.data.base import DataFeed
from training.data.sources import open_evaluation, open_feed
from training.data.stream import shards
from training.errors import RequestError, TrainingError
from training.models import preset

BYTES = "--tokenizer=bytes"
LENGTH = 16
END = "|"
EARLIER = ["f887bbf74172cfd520210dc0fb1b71b3", "40a3a76c1ace6c73bfecc7e0a219972c"]
"""Fingerprints of two files before they included the text's end, and before they included sizes."""


def documents(file: int, count: int) -> list[str]:
    """Make texts that say where they are from, of all kinds of lengths."""
    return [f"<{file}.{number}{'-' * (number * 7 % 40)}>" for number in range(count)]


def write(folder: Path, files: int, count: int = 12) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        lines = [json.dumps({"text": text, "id": 1}) for text in documents(file, count)]
        (folder / f"part{file:02}.jsonl").write_text("\n".join(lines) + "\n")
    return f"stream:{folder}"


def feed(path: str, rank: int = 0, ranks: int = 1, batch: int = 4, **more: Any) -> DataFeed:
    data = DataConfig(
        dataset_path=path,
        seq_length=LENGTH,
        batch_size=batch,
        **{"tokenizer": "bytes", "shuffle_buffer": 5, **more},
    )
    return open_feed(config(data), rank, ranks)


def config(data: DataConfig, **run: Any) -> Config:
    return Config(
        model=ModelConfig(name="mamba-tiny", sizes=preset("mamba-tiny")),
        data=data,
        run=RunConfig(save_ckpt_path="unused", **run),
    )


def rows(feeds: list[DataFeed], steps: int) -> list[list[list[int]]]:
    """Return the sequences of `steps` steps, each in the order of its batches and ranks."""
    found = []
    for _ in range(steps):
        step = []
        for _ in range(feeds[0].accumulation):
            for one in feeds:
                step += one.next_rows(range(one.batch_size)).rows.inputs.tolist()
        found.append(step)
    return found


def state_of(feeds: list[DataFeed]) -> dict[str, Any]:
    """Return the checkpoint of all ranks, read back from its file."""
    shown: list[Any] = []
    for one in feeds:
        one.state(lambda mine: shown.append(mine) or [mine])  # type: ignore[func-returns-value]
    state: dict[str, Any] = json.loads(json.dumps(feeds[0].state(lambda mine: shown)))
    return state


def texts(path: str, *, batch: int = 4, **more: Any) -> list[str]:
    """Return what each lane reads in one epoch."""
    one = feed(path, batch=batch, epochs=1, **more)
    lanes = [""] * batch
    while not (part := one.next_rows(range(batch))).spent:
        for number, (row, targets) in enumerate(
            zip(part.rows.inputs.tolist(), part.rows.targets.tolist(), strict=True)
        ):
            lanes[number] = lanes[number] or chr(row[0])
            lanes[number] += "".join(chr(target) for target in targets if target >= 0)
    return lanes


def test_opening_one_of_many_files_does_not_take_looking_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library splits its list of files by the square root of their number, twice for each."""
    from datasets import iterable_dataset

    count = 100
    for number in range(count):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    opened = shards.Shards(str(tmp_path), "", "train", 0)
    assert opened.count == count
    seen, split = [], iterable_dataset._split_gen_kwargs

    def counted(gen_kwargs: Any, max_num_jobs: int) -> Any:
        seen.append(max_num_jobs)
        return split(gen_kwargs, max_num_jobs)

    monkeypatch.setattr(iterable_dataset, "_split_gen_kwargs", counted)
    read = [text for number in range(count) for text in opened.read(number, 0)]
    assert read == [f"text {number}" for number in range(count)]
    assert sum(seen) < 7 * count * math.isqrt(count)
    again = pickle.loads(pickle.dumps(opened))
    assert list(again.read(count - 1, 0)) == [f"text {count - 1}"]
    assert len(pickle.dumps(opened)) < 1.1 * len(pickle.dumps(again)), "groups are not sent"


@pytest.mark.parametrize("files", [1, 3, 9])
def test_an_epoch_reads_every_document_once_in_a_lane_of_its_own(
    tmp_path: Path, files: int
) -> None:
    path = write(tmp_path, files)
    found = texts(path)
    read = [text for lane in found for text in lane.replace("><", ">\n<").split("\n")]
    whole = [text for file in range(files) for text in documents(file, 12)]
    assert sorted(read) == sorted(whole)
    assert found != texts(path, shuffle_buffer=1), "documents are shuffled"
    assert found == texts(path)


def test_without_a_shuffle_buffer_documents_come_as_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert texts(path, batch=1, shuffle_buffer=1) == ["".join(documents(0, 12))]


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_splits_of_the_same_step_read_the_same(
    tmp_path: Path, ranks: int, batch: int, accumulation: int
) -> None:
    path = write(tmp_path, 5)
    split = [
        feed(path, rank, ranks, batch, gradient_accumulation=accumulation) for rank in range(ranks)
    ]
    assert rows(split, 20) == rows([feed(path)], 20)


def test_another_split_goes_on_exactly_and_another_step_says_what_it_does(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    two = [feed(path, rank, 2, 2) for rank in range(2)]
    rows(two, 17)
    one = feed(path)
    for part in two:  # as after a restart: each rank knows every lane's position
        assert part.resume(state_of(two)) is None
    assert one.resume(state_of(two)) is None
    assert rows([one], 9) == rows(two, 9)
    state = state_of(two)
    assert one.resume(state) is None
    assert rows([one], 9) == rows(two, 9)
    other = feed(path, batch=3)
    warning = str(other.resume(state))
    assert "had 4 sequences and now has 3" in warning and "its epoch 2 begins again" in warning
    assert other.resume(other.state(lambda mine: [mine])) is None
    assert "read from its beginning" in str(feed(path, shuffle_buffer=6).resume(state))


def test_files_that_have_changed_are_other_data(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    one = feed(path)
    rows([one], 3)
    state = state_of([one])
    assert feed(path).resume(state) is None
    with min(tmp_path.iterdir()).open("a") as file:
        file.write('{"text": "more"}\n')
    assert "read from its beginning" in str(feed(path).resume(state))


@pytest.mark.parametrize("fingerprint", EARLIER)
def test_checkpoints_of_earlier_versions_go_on(tmp_path: Path, fingerprint: str) -> None:
    path = write(tmp_path, 2)
    one = feed(path)
    rows([one], 3)
    assert feed(path).resume({**state_of([one]), "fingerprint": fingerprint}) is None


def test_a_row_of_a_long_document_takes_no_copy_of_what_is_left_of_it(tmp_path: Path) -> None:
    long = 4_000_000
    (tmp_path / "long.txt").write_text("x" * long)
    one = feed(f"stream:{tmp_path}/long.txt", batch=1)
    rows([one], 1)  # reads the document
    tracemalloc.start()
    try:
        rows([one], 1)
        assert tracemalloc.get_traced_memory()[1] < long
    finally:
        tracemalloc.stop()


def flags(save: Path, path: str, *more: str) -> tuple[str, ...]:
    return (
        *TINY,
        f"--dataset_path={path}",
        f"--save_ckpt_path={save}",
        BYTES,
        "--shuffle_buffer=5",
        "--batch_size=2",
        "--num_steps=14",
        "--report_interval=1",
        *more,
    )


@pytest.mark.processes
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    path = write(tmp_path / "texts", 5)
    train(tmp_path / "whole", path, 2, 2, 14, BYTES, "--shuffle_buffer=5")
    save = tmp_path / "killed"
    asked = flags(save, path, "--checkpoint_interval=5")
    with started(2, *asked) as process:
        assert wait_for(lambda: list(save.glob("checkpoints/step_*_ckp")), process)
        kill_tree(process)
    done = run(2, *asked)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    assert steps(save) == steps(tmp_path / "whole")


@pytest.mark.processes
def test_evaluations_read_the_same_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "texts", 5)
    held_out = write(tmp_path / "held", 2)
    evaluation = (f"--eval_dataset_path={held_out}", "--eval_batches=0", "--eval_interval=1")
    still = ("--learning_rate=1e-30", "--eval_batch_size=3", "--num_steps=2")
    done = run(2, *flags(tmp_path / "run", path, *evaluation, *still))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line["kind"] == "evaluation"]
    assert found[0]["loss"] == found[1]["loss"]
    everything = sum(len(text) for file in range(2) for text in documents(file, 12))
    assert found[0]["tokens"] == everything - 6, "all but the first of each of six lanes"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LONGEST_WAIT", 0.0)


def test_a_broken_connection_is_taken_up_again(tmp_path: Path, quick: None) -> None:
    whole = write(tmp_path, 1, 400)
    content = (tmp_path / "part00.jsonl").read_bytes()
    with serving() as web:
        web.files["/part00.jsonl"] = content
        web.files["/part00.jsonl.gz"] = gzip.compress(content)
        for name in web.files:
            web.cuts[:] = []
            path = f"stream:{web.url}{name}"
            one = feed(path)
            web.cuts += [len(web.files[name]) // 2, 100, 7]
            assert rows([one], 30) == rows([feed(whole)], 30)
            assert not web.cuts


def test_a_server_that_is_gone_ends_the_run_after_so_many_tries(
    tmp_path: Path, quick: None
) -> None:
    write(tmp_path, 1)
    with serving() as web:
        web.files["/a.jsonl"] = (tmp_path / "part00.jsonl").read_bytes()
        one = feed(f"stream:{web.url}/a.jsonl", stream_retries=2)
        web.code = 503
        with pytest.raises(TrainingError, match=r"a\.jsonl cannot be reached.*stream_retries=2"):
            rows([one], 1)


@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "not compressed"])
def test_a_broken_compressed_file_of_a_disk_is_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: bool
) -> None:
    content = b'{"text": "some words"}\n' * 9
    broken = gzip.compress(content)[:-12] if cut else content
    (tmp_path / "a.jsonl.gz").write_bytes(broken)
    with pytest.raises((RequestError, TrainingError), match=r"a\.jsonl\.gz cannot be read: "):
        rows([feed(f"stream:{tmp_path}")], 1)
    assert "try 1" not in caplog.text


def test_what_is_wrong_with_texts_is_reported_with_its_file(tmp_path: Path) -> None:
    for name, content, message in (
        ("broken", '{"text": "a"}\n{"text": "b\n', "broken.jsonl.* cannot be read: JSON parse"),
        ("other", '{"body": "a"}\n', "other.jsonl.*: there is no column 'text'; there are: body"),
        ("number", '{"text": 5}\n', "number.jsonl.*: there is int64, not text, in column 'text'"),
        ("mixed", '{"text": "a"}\n{"text": 5}\n', "mixed.*: there is text and other values, not"),
        ("missing", '{"id": 2}\n{"text": "a"}\n', "missing.jsonl.*: document 1 has no text"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_text(content)
        with pytest.raises(RequestError, match=message):
            feed(f"stream:{tmp_path / name}", stream_retries=0)
    write(tmp_path / "two", 2)
    (tmp_path / "two" / "part01.jsonl").write_text('{"id": 2}\n')
    with pytest.raises(TrainingError, match=r"part01\.jsonl: .*has no text|part01.*no column"):
        rows([feed(f"stream:{tmp_path / 'two'}")], 3)
    few = feed(write(tmp_path / "few", 1, 3))
    with pytest.raises(TrainingError, match="too few documents for 4 sequences a step"):
        rows([few], 1)


def test_files_may_have_other_columns_beside_the_text(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    expected = rows([feed(path)], 20)
    file = tmp_path / "part01.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    others = [{"from": {"page": 1}, "text": line["text"]} for line in lines]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in others))
    assert rows([feed(path)], 20) == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tokenizer": ""}, "tokenizer: a stream needs one"),
        ({"tokenizer": "/none.json"}, "^tokenizer: /none.json does not exist"),
        ({"dataset_config": "en"}, "dataset_path: .* has no configuration 'en'"),
        ({"dataset_split": "test"}, "dataset_split: .* has no split 'test'; there are: train"),
        (
            {"n_samples_to_skip": 4},
            "n_samples_to_skip: not possible with a stream; fix: tokenize it",
        ),
        (
            {"position_weighting": True},
            "position_weighting: not possible with a stream; fix: tokenize it",
        ),
    ],
)
def test_what_a_stream_cannot_do_is_refused(tmp_path: Path, more: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        feed(write(tmp_path, 1), **more)


def test_settings_that_nothing_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer: only a stream uses it"):
        feed("synthetic:")
    data = DataConfig(dataset_path="synthetic:", eval_dataset_path="stream:", tokenizer="bytes")
    with pytest.raises(RequestError, match="eval_dataset_path: stream: must be followed by"):
        open_evaluation(config(data), 0, 1)


def test_a_tokenizer_ends_documents_and_must_fit_the_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text('{"text": "b b b"}\n{"text": "a"}\n' * 9)
    path = f"stream:{tmp_path / 'texts.jsonl'}"
    given: dict[str, Any] = {"tokenizer": str(tmp_path), "shuffle_buffer": 1}
    assert rows([feed(path, batch=1, **given)], 1) == [[[2, 2, 2, 0, 1, 0] * 2 + [2, 2, 2, 0]]]
    state = state_of([feed(path, **given)])
    assert feed(path, **given).resume(state) is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert "read from its beginning" in str(feed(path, **given).resume(state))
    assert not feed(path, batch=1, **given).notes
    (tmp_path / "endless").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(f"{tmp_path}/endless/tokenizer.json")
    (note,) = feed(path, batch=1, tokenizer=f"{tmp_path}/endless").notes
    assert note.startswith(f"WARNING: {tmp_path}/endless states no end-of-text token")
    made = Tokenizer(models.WordLevel({**words, "c": 256}, unk_token="a"))
    (tmp_path / "tokenizer_config.json").unlink()
    made.save(str(tmp_path / "large.json"))
    with pytest.raises(RequestError, match=r"has token ids up to 256, .*; fix: .*257"):
        feed(path, tokenizer=str(tmp_path / "large.json"))
