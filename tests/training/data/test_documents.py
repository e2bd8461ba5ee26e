"""Every kind of data reports where documents begin: tokenized, mixed, or read ahead."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.data.test_stream import config, state_of
from training.config.config import Config, DataConfig
from training.data.arrow import Arrow
from training.data.base import DataFeed, Samples, begun
from training.data.lines import Lines
from training.data.packed import LAYOUTS, Packed, PackedWriter
from training.data.sources import Text, open_evaluation, open_feed, open_samples
from training.data.tokenize.__main__ import tokenize
from training.data.tokenize.blocks import DOCUMENTS, METADATA
from training.errors import RequestError

LENGTH = 16
TEXTS = [f"<{number:02}{'-' * (number * 7 % 23)}>" for number in range(60)]
"""Each begins with < and ends with >, with 4 to 26 bytes."""
OPEN, CLOSE = ord("<"), ord(">")


def write_files(folder: Path) -> str:
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "30-empty.txt").touch()
    return f"text:{folder}/*.txt"


def write_packed(folder: Path, layout: str = "16/14") -> str:
    folder.mkdir(parents=True)
    with PackedWriter(folder / "a.npy", layout=LAYOUTS[layout]) as writer:
        for text in TEXTS:
            writer.write(list(text.encode()))
    return ("packed:" if layout == "16/14" else f"packed-{layout}:") + f"{folder}/a.npy"


def write_wide(folder: Path) -> str:
    return write_packed(folder, "17/13")


def write_stream(folder: Path) -> str:
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return f"stream:{folder}"


def write_set(folder: Path) -> str:
    source = write_stream(folder / "texts").removeprefix("stream:")
    save = folder / "set"
    argv = [f"--dataset={source}", "--tokenizer=bytes", f"--seq_len={LENGTH}", "--num_proc=1"]
    tokenize([*argv, f"--save_path={save}"])
    return str(save)


KINDS: list[Callable[[Path], str]] = [
    write_files,
    write_packed,
    write_wide,
    write_stream,
    write_set,
]


def asked(path: str, **more: Any) -> Config:
    data: dict[str, Any] = {"dataset_path": path, "seq_length": LENGTH, "batch_size": 4, **more}
    if path.startswith("stream:"):
        data |= {"tokenizer": "bytes", "shuffle_buffer": 5}
    return config(DataConfig(**data))


def check(inputs: list[int], documents: list[int]) -> None:
    """Check that a document begins at each <, and nowhere else."""
    assert documents[0] == 0
    for at in range(1, len(inputs)):
        assert documents[at] - documents[at - 1] == (inputs[at] == OPEN), (inputs, documents)


def rows_of(feed: DataFeed, batches: int) -> list[tuple[list[int], list[int]]]:
    found = []
    for _ in range(batches):
        rows = feed.next_rows(range(feed.batch_size)).rows
        assert rows.seq_idx is not None and rows.seq_idx.dtype == torch.int32
        found += list(zip(rows.inputs.tolist(), rows.seq_idx.tolist(), strict=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_begins_where_a_text_did(tmp_path: Path, kind: Callable[[Path], str]) -> None:
    feed = open_feed(asked(kind(tmp_path / "data")), 0, 1)
    assert feed.knows_documents and feed.documents
    found = rows_of(feed, 8)
    for inputs, documents in found:
        check(inputs, documents)
    assert any(documents[-1] > 1 for _, documents in found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_after_resuming_says_the_same(
    tmp_path: Path, kind: Callable[[Path], str]
) -> None:
    request = asked(kind(tmp_path / "data"))
    first = open_feed(request, 0, 1)
    rows_of(first, 3)
    state = state_of([first])
    again = open_feed(request, 0, 1)
    assert again.resume(state) is None
    assert rows_of(again, 4) == rows_of(first, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_nothing_is_said_and_the_data_is_the_same(
    tmp_path: Path, kind: Callable[[Path], str]
) -> None:
    path = kind(tmp_path / "data")
    on, off = (open_feed(asked(path, reset_documents=one), 0, 1) for one in (True, False))
    assert on.fingerprint == off.fingerprint
    rows, plain = (one.next_rows(range(4)).rows for one in (on, off))
    assert plain.seq_idx is None
    assert torch.equal(rows.inputs, plain.inputs) and torch.equal(rows.targets, plain.targets)


def test_a_mixture_says_it_of_all_that_know(tmp_path: Path) -> None:
    entries = [
        {"path": write_packed(tmp_path / "packed"), "weight": 0.5},
        {"path": write_files(tmp_path / "files"), "weight": 0.25},
        {"path": "synthetic:", "weight": 0.25},
    ]
    (tmp_path / "mixture.yaml").write_text(json.dumps(entries))
    found = rows_of(open_feed(asked(f"mixture:{tmp_path}/mixture.yaml"), 0, 1), 20)
    texts = [(one, documents) for one, documents in found if set(one) <= set(range(33, 64))]
    assert len(texts) > 40
    for inputs, documents in texts:
        check(inputs, documents)
    assert all(not any(documents) for one, documents in found if max(one) > 127)
    alone = tmp_path / "alone.yaml"
    alone.write_text(json.dumps(entries[2:]))
    assert not open_feed(asked(f"mixture:{alone}"), 0, 1).documents


def test_lines_are_documents_after_their_padding(tmp_path: Path) -> None:
    rows = [
        ([7, 7, 1, 2, 3, 9], [0, 0, 1, 1, 1, 1]),
        ([1, 2, 3, 7], [1, 1, 1, 0]),
        ([1, 9, 2, 9, 3, 4], [1] * 6),
    ]
    lines = [json.dumps({"input_ids": ids, "attention_mask": mask}) for ids, mask in rows]
    (tmp_path / "a.json").write_text("\n".join(lines))
    samples = Lines(tmp_path, 6, seed=0)
    assert [samples[at].seq_idx.tolist() for at in range(3)] == [  # type: ignore[union-attr]
        [0, 0, 1, 1, 1, 1],
        [0] * 6,
        [0] * 6,
    ]
    ended = Lines(tmp_path, 6, seed=0, document_end=9)
    assert ended[2].seq_idx.tolist() == [0, 0, 1, 1, 2, 2]  # type: ignore[union-attr]
    assert ended.fingerprint == samples.fingerprint


def test_a_set_that_does_not_say_goes_by_a_token(tmp_path: Path) -> None:
    path = Path(write_set(tmp_path))
    by_ends = Arrow(str(path), LENGTH)
    (path / DOCUMENTS).unlink()
    unknowing = Arrow(str(path), LENGTH)
    assert not unknowing.knows_documents and unknowing[0].seq_idx is None
    asked_for = Arrow(str(path), LENGTH, document_end=CLOSE)
    about = json.loads((path / METADATA).read_text())
    (path / METADATA).write_text(json.dumps({**about, "eos": CLOSE}))
    stated = Arrow(str(path), LENGTH)
    for index in range(len(by_ends)):
        wanted = by_ends[index].seq_idx
        assert wanted is not None
        for other in (asked_for, stated):
            assert torch.equal(other[index].seq_idx, wanted)  # type: ignore[arg-type]


def test_rows_of_a_set_that_are_cut_count_on(tmp_path: Path) -> None:
    whole = Arrow(write_set(tmp_path), LENGTH // 2)
    for index in range(len(whole)):
        one = whole[index]
        assert one.seq_idx is not None
        check(one.inputs.tolist(), one.seq_idx.tolist())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 9))
def test_numbers_follow_from_where_documents_end(sizes: list[int], first: int, length: int) -> None:
    """It includes empty documents."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    owner = [at for at, size in enumerate(sizes) for _ in range(size)]
    part = (owner + [len(sizes)] * 40)[first : first + length]
    wanted = [len(set(part[: at + 1])) - 1 for at in range(length)]
    assert begun(ends, first, length).tolist() == wanted


def test_data_that_does_not_know_is_not_reset_and_said_so_where_it_is_asked() -> None:
    assert not open_feed(asked("synthetic:"), 0, 1).documents
    with pytest.raises(RequestError) as caught:
        open_feed(asked("synthetic:", reset_documents=True), 0, 1)
    assert str(caught.value).startswith("reset_documents: dataset_path does not know")
    assert "document_end" in str(caught.value)


def test_what_is_evaluated_on_is_read_alike(tmp_path: Path) -> None:
    paths = [write_packed(tmp_path / name) for name in "ab"]
    for reset in (None, False):
        held_out = open_evaluation(
            asked(paths[0], eval_dataset_path=paths[1], reset_documents=reset), 0, 1
        )
        assert held_out is not None and held_out.documents == (reset is None)


@pytest.mark.parametrize(
    ("settings_", "shown"),
    [
        ({"dataset_path": "text:/x", "document_end": 0}, "only a set on disk or lines uses it"),
        (
            {"dataset_path": "/x", "document_end": 0, "reset_documents": False},
            "document_end: reset_documents=False ignores it",
        ),
        (
            {"dataset_path": "/x", "document_end": 256},
            "document_end: 256 is beyond the vocabulary of mamba-tiny, which has 256 ids",
        ),
        ({"dataset_path": "/x", "document_end": -2}, "document_end: must be at least -1, not -2"),
    ],
)
def test_bad_input(settings_: dict[str, Any], shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        config(DataConfig(**settings_))
    assert shown in str(caught.value)


def test_rows_of_one_document_each_carry_nothing_to_the_device(tmp_path: Path) -> None:
    samples: Samples = Text(write_files(tmp_path / "a").removeprefix("text:"), 4)
    one = samples[0]
    assert one.seq_idx is not None and not one.seq_idx.any()
    assert one.to(torch.device("cpu")).seq_idx is None
    long = open_samples(f"text:{tmp_path}/a/*.txt", LENGTH, "dataset_path", 256, 0)
    assert long[0].to(torch.device("cpu")).seq_idx is not None
    assert Packed(f"{write_packed(tmp_path / 'b').removeprefix('packed:')}", LENGTH).knows_documents
