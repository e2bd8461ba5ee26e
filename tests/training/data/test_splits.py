"""Local folders by split: as datasets.load_dataset reads them, and never two splits together."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.training.data import test_stream
from tests.training.support.runs import TINY, run
from training.config.config import Config, DataConfig, ModelConfig, RunConfig
from training.data.sources import open_evaluation, open_feed
from training.data.splits import find
from training.data.stream.shards import Shards
from training.data.tokenize.__main__ import tokenize
from training.errors import RequestError
from training.llama_fsdp import configure
from training.models import preset

datasets = pytest.importorskip("datasets")
BYTES = ("--tokenizer=bytes", "--seq_len=1", "--num_proc=1")
CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/first*
  - split: validation
    path: en/held*
- config_name: fr
  data_files: fr/*.csv
---
What this is.
"""
NAMES_SPLITS = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train.jsonl
  - split: validation
    path: validation.jsonl
---
"""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of datasets other than the user's, and no hub."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    for name, value in (("HF_HOME", str(folder)), ("HF_DATASETS_OFFLINE", "1")):
        patch.setenv(name, value)
    patch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    yield
    patch.undo()


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        return bytes(zstandard.ZstdCompressor().compress(content))
    made: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    return made[Path(name).suffix](content) if Path(name).suffix in made else content


def write(folder: Path, *names: str, rows: int = 3) -> Path:
    """Write files of a few documents, each with a text that says where it is."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"<{name} {number}>" for number in range(rows)]
        if name.endswith(".parquet"):
            datasets.Dataset.from_dict({"text": texts}).to_parquet(str(path))
            continue
        if ".csv" in name:
            lines = ["id,text", *(f"{number},{text}" for number, text in enumerate(texts))]
        elif ".tsv" in name:
            lines = ["id\ttext", *(f"{number}\t{text}" for number, text in enumerate(texts))]
        elif ".json" in name:
            lines = [json.dumps({"text": text}) for text in texts]
        else:
            lines = texts
        path.write_bytes(packed(name, "\n".join(lines).encode() + b"\n"))
    return folder


LAYOUTS: dict[str, tuple[str, ...]] = {
    "no names": ("b.jsonl", "a.jsonl"),
    "files named for splits": ("train.jsonl", "validation.jsonl"),
    "short names": ("my-train-1.jsonl", "my-dev-1.jsonl", "my-eval-1.jsonl"),
    "valid and testing": ("training_0.csv", "valid_0.csv", "testing_0.csv"),
    "folders named for splits": ("train/a.txt", "val/b.txt", "test/c.txt"),
    "C4": (
        "en/c4-train.00000-of-00002.json.gz",
        "en/c4-train.00001-of-00002.json.gz",
        "en/c4-validation.00000-of-00001.json.gz",
    ),
    "shards of any split": (
        "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet",
        "data/extra-00000-of-00001.parquet",
    ),
    "named twice over": ("training/train/a.jsonl", "test/b.jsonl"),
    "of two splits by its name": ("train-test.jsonl", "x-train.jsonl"),
    "one is named, the rest is not": ("a.jsonl", "b.jsonl", "my_test.jsonl"),
    "words within words": ("strained.jsonl", "latest.jsonl", "devices.jsonl"),
    "two kinds": ("a.jsonl", "b.jsonl", "LICENSE.txt"),
    "hidden": (".git/train.jsonl", "a.jsonl", "__pycache__/test.jsonl"),
    "signs of patterns": ("we[i]rd/train*.jsonl", "we[i]rd/test?.jsonl"),
    "compressed": ("train.json.zst", "validation.json.zst"),
    "compressed otherwise": ("a.txt.xz", "b.txt.bz2", "c.txt"),
    "tabs": ("train.tsv", "test.tsv"),
    "a dry name": ("train.v2.final.jsonl", "README.txt.jsonl"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_has_the_splits_that_the_library_finds(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "set", *LAYOUTS[layout])
    right = datasets.load_dataset(str(folder), **text_options(LAYOUTS[layout]))
    found = find(str(folder))
    assert set(found.splits) == set(right)
    for split in found.splits:
        # The library reads a file twice if two of its patterns match; here each text is read once.
        expected = list(dict.fromkeys(right[split]["text"]))
        assert found.load(split)["text"][:] == expected
        assert streamed(str(folder), split) == expected


def test_a_folder_may_be_called_as_a_builder_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "json", "train.csv", "test.csv")
    assert streamed("json", "test") == [f"<test.csv {number}>" for number in range(3)]


def test_a_link_to_a_folder_is_read_without_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "set", "a.jsonl", "b.jsonl", "c.csv")
    (tmp_path / "link").symlink_to("set")
    for name in ("set", "link"):
        left_out = find(str(tmp_path / name)).left_out
        assert [Path(one).name for one in left_out] == ["c.csv"]


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?"])
def test_a_folder_whose_name_has_signs_of_patterns_is_refused(tmp_path: Path, name: str) -> None:
    """The library would read neighboring files that match."""
    write(tmp_path / name, "x.jsonl")
    write(tmp_path / "ab", "y.jsonl")
    with pytest.raises(RequestError, match="has a wildcard") as raised:
        find(str(tmp_path / name))
    pattern = shlex.split(str(raised.value))[-1]
    assert streamed(pattern, "train") == [f"<x.jsonl {number}>" for number in range(3)]


def text_options(names: tuple[str, ...]) -> dict[str, object]:
    is_text = all(".txt" in Path(name).suffixes for name in names)
    return {"sample_by": "document", "keep_linebreaks": True} if is_text else {}


def streamed(name: str, split: str, config: str = "") -> list[str]:
    shards = Shards(name, config, split, retries=0)
    return list(chain.from_iterable(shards.read(shard, 0) for shard in range(shards.count)))


def test_a_card_says_what_is_which_split_of_which_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path, "en/first.jsonl", "en/held.jsonl", "fr/x.csv", "stray.jsonl")
    (folder / "README.md").write_text(CARD)
    for split, file in (("train", "en/first.jsonl"), ("validation", "en/held.jsonl")):
        assert streamed(str(folder), split, "en") == [f"<{file} {number}>" for number in range(3)]
    assert streamed(str(folder), "train", "fr") == [f"<fr/x.csv {number}>" for number in range(3)]
    for config, message in (
        ("", "has the configurations en, fr; fix: name one with dataset_config"),
        ("de", "has the configurations en, fr, and no 'de'; fix: name one"),
    ):
        with pytest.raises(RequestError, match=message):
            find(str(folder), config)
    with pytest.raises(RequestError, match=r"only a folder whose README\.md lists some"):
        find(str(folder / "en"), "en")


def saved(folder: Path) -> Path:
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"<{name} {n}>" for n in range(rows)]})
        for name, rows in (("train", 30), ("validation", 8))
    }
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    return folder


def carded(folder: Path) -> Path:
    for name, rows in (("train", 30), ("validation", 8)):
        write(folder, f"{name}.jsonl", rows=rows)
    (folder / "README.md").write_text(NAMES_SPLITS)
    return folder


def cloned(folder: Path) -> Path:
    write(folder, "en/c4-train.00000-of-00001.json.gz", rows=30)
    return write(folder, "en/c4-validation.00000-of-00001.json.gz", rows=8)


@pytest.mark.parametrize("make", [carded, cloned, saved])
@pytest.mark.parametrize(("split", "rows"), [("train", 30), ("validation", 8)])
def test_a_split_is_tokenized_alone(
    tmp_path: Path, make: Callable[[Path], Path], split: str, rows: int
) -> None:
    folder = make(tmp_path / "mine")
    right = datasets.load_from_disk(str(folder)) if make is saved else None
    right = right or datasets.load_dataset(str(folder))
    flags = ("--tokenizer=bytes", "--seq_len=8", "--num_proc=1", f"--split={split}")
    tokenize([f"--dataset={folder}", f"--save_path={tmp_path}/set", *flags])
    made = datasets.load_from_disk(str(tmp_path / "set"))["input_ids"][:]
    line = bytes(chain.from_iterable(made)).decode()
    everything = "".join(right[split]["text"])
    assert line == everything[: len(line)] and len(everything) - len(line) < 8
    assert line.count(">") in (rows - 1, rows)
    with pytest.raises(RequestError, match=r"^--split: .* no split 'test'; .* validation \(1 file"):
        tokenize([f"--dataset={folder}", f"--save_path={tmp_path}/no", *flags[:3], "--split=test"])


def test_a_part_of_a_split_and_two_of_them_are_tokenized(tmp_path: Path) -> None:
    write(tmp_path / "mine", "train.jsonl", "test.jsonl", rows=10)
    flags = (f"--dataset={tmp_path}/mine", "--tokenizer=bytes", "--seq_len=1", "--num_proc=1")
    for split, count in (("train[:20%]", 2), ("train+test", 20)):
        tokenize([*flags, f"--save_path={tmp_path}/{count}", f"--split={split}"])
        made = bytes(chain.from_iterable(datasets.load_from_disk(f"{tmp_path}/{count}")["labels"]))
        assert made.count(b">") == count


def config(**data: str | int) -> Config:
    settings = {"tokenizer": "bytes", "seq_length": 8, "batch_size": 1, "shuffle_buffer": 1, **data}
    return Config(
        model=ModelConfig(name="mamba-tiny", sizes=preset("mamba-tiny")),
        data=DataConfig(**settings),  # type: ignore[arg-type]
        run=RunConfig(save_ckpt_path="unused"),
    )


def test_nothing_is_evaluated_on_that_is_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "one", "a.jsonl")
    write(tmp_path / "both", "train-test.jsonl", "train.jsonl", "validation.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, link, both = (f"stream:{tmp_path / name}" for name in ("one", "link", "both"))
    for train, held_out, split in (
        (one, one, "validation"),
        (one, link, "validation"),
        (f"{one}/a.jsonl", one, "validation"),
        (both, both, "test"),
        (both, both, "train"),
        (both, f"{both}/train.jsonl", "validation"),
    ):
        with pytest.raises(
            RequestError, match=r"^eval_dataset_path: .* is trained on; fix: hold out"
        ):
            open_evaluation(
                config(dataset_path=train, eval_dataset_path=held_out, eval_split=split), 0, 1
            )
    assert open_evaluation(config(dataset_path=both, eval_dataset_path=both), 0, 1)
    assert open_evaluation(config(dataset_path=both, eval_dataset_path=one), 0, 1)
    on_disk = str(tmp_path / "set")
    flags = ("--tokenizer=bytes", "--seq_len=8", "--num_proc=1")
    tokenize([f"--dataset={tmp_path}/one", f"--save_path={on_disk}", *flags])
    with pytest.raises(
        RequestError, match=r"^eval_dataset_path: .*set is trained on; fix: hold out"
    ):
        open_evaluation(
            config(
                dataset_path=on_disk, eval_dataset_path=on_disk, tokenizer="", shuffle_buffer=1000
            ),
            0,
            1,
        )


def test_a_split_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", "my_test.jsonl")
    left_out = r"no split 'train'; there are: test \(1 file\); in no split, so not read: 2 files: "
    with pytest.raises(RequestError, match=f"^dataset_split: .*{left_out}"):
        open_feed(config(dataset_path=f"stream:{tmp_path}"), 0, 1)
    assert open_feed(config(dataset_path=f"stream:{tmp_path}/*.jsonl"), 0, 1)
    for name in ("train.jsonl", "validation.jsonl"):
        write(tmp_path, name)
    write(tmp_path / "plain", "a.jsonl")
    with pytest.raises(RequestError, match=r"^dataset_split: .* no split 'validation'; there are"):
        plain = {"dataset_path": f"stream:{tmp_path}/plain", "dataset_split": "validation"}
        open_feed(config(**plain), 0, 1)
    with pytest.raises(
        RequestError, match=r"has files of several splits, by the names .*train.jsonl and "
    ):
        open_feed(config(dataset_path=f"stream:{tmp_path}/*.jsonl"), 0, 1)
    monkeypatch.chdir(tmp_path)
    assert open_feed(config(dataset_path=f"stream:{tmp_path}/a.jsonl,plain/a.jsonl"), 0, 1)
    with pytest.raises(
        RequestError, match=r"has files of several splits, by the names .*train.jsonl and "
    ):
        open_feed(config(dataset_path=f"stream:{tmp_path}/train.jsonl,validation.jsonl"), 0, 1)
    for name in ("train-stations.txt", "test-drive.txt"):  # documents with such titles
        write(tmp_path / "texts", name)
    assert open_feed(config(dataset_path=f"stream:{tmp_path}/texts/*.txt"), 0, 1)


@pytest.mark.parametrize("make", [carded, saved])
def test_a_split_is_read_once_an_epoch_and_gone_on_with(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = f"stream:{make(tmp_path / 'mine')}"
    read = re.findall(r"<[^>]*>", "".join(test_stream.texts(path)))
    assert len(read) == len(set(read)) == 30 and all("train" in text for text in read)
    one, again = test_stream.feed(path), test_stream.feed(path)
    test_stream.rows([one], 9)
    assert again.resume(test_stream.state_of([one])) is None
    assert test_stream.rows([again], 20) == test_stream.rows([one], 20)


def test_validation_freq_finds_the_held_out_split_of_a_folder(tmp_path: Path) -> None:
    flags = ("--checkpoint_dir=/x", "--validation_freq=5")
    for make in (carded, cloned, saved):
        source = f"stream:{make(tmp_path / make.__name__)}"
        assert configure((*flags, f"--dataset={source}")).data.eval_dataset_path == source
    write(tmp_path / "one", "train.jsonl")
    message = (
        r"^validation_freq: .* no split 'validation'; there are: train \(1 file\); fix: name one"
    )
    with pytest.raises(RequestError, match=message):
        configure((*flags, f"--dataset=stream:{tmp_path}/one"))


@pytest.mark.processes
@pytest.mark.parametrize("make", [carded, saved])
def test_a_run_trains_on_one_split_and_evaluates_on_the_other(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path / "mine")
    done = run(
        0,
        *(*TINY, "--tokenizer=bytes", "--batch_size=1", "--num_steps=500", "--epochs=1"),
        *(f"--dataset_path=stream:{folder}", f"--eval_dataset_path=stream:{folder}"),
        *("--eval_batches=0", f"--save_ckpt_path={tmp_path}/run", "--report_interval=100"),
    )
    assert done.returncode == 0, done.stderr
    where = "mine/validation" if make is saved else "mine/validation.jsonl"
    assert f"dataset_path: split 'train' of {folder}: 1 file: " in done.stdout
    assert f"eval_dataset_path: split 'validation' of {folder}: 1 file: " in done.stdout
    assert where in done.stdout.partition("eval_dataset_path")[2].partition("\n")[0]
    right = datasets.load_from_disk(str(folder)) if make is saved else None
    right = right or datasets.load_dataset(str(folder))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line["kind"] == "evaluation"]
    assert found[-1]["tokens"] == len("".join(right["validation"]["text"])) - 1
    trained = len("".join(right["train"]["text"])) - 1
    assert [json.loads(line)["step"] for line in lines if '"step"' in line][-1] == -(-trained // 17)
