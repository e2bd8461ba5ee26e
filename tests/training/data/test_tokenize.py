"""Tokenizing: the tokens are the tokenizer's own, in one line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from tests.support.web_servers import serving
from tests.training.support.tokenizing import (
    END,
    SOURCE,
    datasets,
    make,
    run,
    tokenizers,
    write_jsonl,
    write_parquet,
    write_set,
    write_txt,
)
from tests.training.support.tokenizing import place_fixture as place_fixture
from training.data.arrow import Arrow
from training.data.pack import pack
from training.data.tokenize import blocks
from training.data.tokenize import tokenizer as encoder
from training.data.tokenize.__main__ import tokenize
from training.data.tokenize.texts import open_texts
from training.data.tokenize.tokenizer import Encoder, open_tokenizer
from training.errors import RequestError


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["short\n", "", *(path.read_text() for path in SOURCE[:12]), "the end"]


def expected(place: Path, texts: list[str], seq_len: int, end: bool = True) -> list[list[int]]:
    """Return the rows made by the library alone."""
    made = tokenizers.Tokenizer.from_file(str(place / "bpe" / "tokenizer.json"))
    made.no_truncation()
    last = [made.token_to_id(END)] if end else []
    line = list(chain.from_iterable(made.encode(text).ids + last for text in texts if text))
    return [line[at : at + seq_len] for at in range(0, len(line) - seq_len + 1, seq_len)]


def rows(path: Path) -> list[list[int]]:
    found = datasets.load_from_disk(str(path))
    assert found.column_names == ["input_ids", "labels"]
    assert found["input_ids"][:] == found["labels"][:]
    return found["input_ids"][:]


@pytest.mark.parametrize("write", [write_txt, write_jsonl, write_parquet, write_set])
def test_rows_are_the_tokenizers_own_tokens_in_one_line(
    place: Path, texts: list[str], tmp_path: Path, write: Callable[[Path, list[str]], object]
) -> None:
    (tmp_path / "data").mkdir()
    made = make(place, write(tmp_path / "data", texts), tmp_path / "set", "--seq_len=128")
    right = expected(place, texts, 128)
    assert rows(made) == right
    samples = Arrow(str(made), 128)
    assert samples.vocab_size == 1000 and len(samples) == len(right)
    assert samples[3].inputs.tolist() == right[3]
    assert not list(tmp_path.glob(".*")), "nothing is left of the work"


def test_the_end_of_text_can_be_left_out(place: Path, texts: list[str], tmp_path: Path) -> None:
    data = write_txt(tmp_path, texts)
    made = make(place, data, tmp_path / "set", "--seq_len=64", "--append_eos=False")
    assert rows(made) == expected(place, texts, 64, end=False)


def test_dryrun_takes_the_samples_of_the_known_scripts(place: Path, tmp_path: Path) -> None:
    lines = [f"text number {number}" for number in range(9000)]
    (tmp_path / "data").mkdir()
    data = write_jsonl(tmp_path / "data", lines)
    made = make(place, data, tmp_path / "set", "--dryrun", "--seq_len", "32")
    source = datasets.Dataset.from_dict({"text": lines}).shuffle(seed=42).select(range(8192))
    assert rows(made) == expected(place, source["text"][:], 32)


@pytest.mark.parametrize("split", ["paragraph", "line"])
def test_a_text_file_can_be_many_texts(place: Path, tmp_path: Path, split: str) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\nfour")
    made = make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=1", f"--sample_by={split}")
    end = tokenizers.Tokenizer.from_file(str(place / "bpe" / "tokenizer.json")).token_to_id(END)
    assert rows(made).count([end]) == {"paragraph": 2, "line": 5}[split]


@pytest.mark.parametrize("by", ["document", "line"])
def test_a_mark_of_utf_8_is_no_part_of_a_text(tmp_path: Path, by: str) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("three\ufeff\n", encoding="utf-8-sig")
    found = open_texts(f"{tmp_path}/*.txt", sample_by=by)
    assert "".join(found.read(0, len(found))) == "one\ntwo\nthree\ufeff\n"


def test_bytes_need_no_file(place: Path, tmp_path: Path) -> None:
    text = "Grüße, 世界\n" * 40
    (tmp_path / "a.txt").write_bytes(text.encode())
    base = (f"--dataset={tmp_path}", "--tokenizer", "bytes", f"--save_path={tmp_path}/set")
    tokenize([*base, "--seq_len=32", "--num_proc=1"])
    found = bytes(chain.from_iterable(rows(tmp_path / "set")))
    assert text.encode().startswith(found) and len(found) > len(text.encode()) - 32
    assert Arrow(f"{tmp_path}/set", 32).vocab_size == 256


def test_texts_longer_than_a_piece_are_cut_after_lines(
    place: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(str(place / "bpe"))
    whole = Encoder(tokenizer, append_eos=True).encode(texts).tolist()
    monkeypatch.setattr(encoder, "PIECE", 3000)
    assert sum(len(batch) for batch in encoder._batches(texts)) > sum(map(len, texts)) // 3000, (
        "the texts are in pieces"
    )
    made = tokenizers.Tokenizer.from_str(tokenizer.definition)
    found = Encoder(tokenizer, append_eos=True).encode(texts).tolist()
    assert made.decode(found) == made.decode(whole) == "".join(texts)
    assert found.count(tokenizer.eos) == whole.count(tokenizer.eos) == len(texts) - 1
    monkeypatch.setattr(encoder, "PIECE", 10)
    for text in ("x" * 95, "a word " * 20, "\n" * 33, "line\n" * 9, " " + "y" * 30):
        pieces = list(chain.from_iterable(encoder._batches([text])))
        assert "".join(piece for piece, _, _ in pieces) == text and len(pieces) > 3


@pytest.mark.parametrize("by", ["normalizer", "pre-tokenizer", "byte level"])
def test_a_tokenizer_that_begins_texts_with_a_blank_does_so_once_a_text(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers of Llama 2 and Mistral do that."""
    lines = [f"{' ' * (n % 3)}line {n}, and {'more ' * (n % 5)}words" for n in range(300)]
    text = "\n".join(lines)
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if by == "normalizer":
        blanks = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(blanks)
    elif by == "pre-tokenizer":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    cut = Encoder(open_tokenizer(str(tmp_path)), append_eos=True)
    whole = made.encode(text).ids
    assert whole != [one for line in lines for one in made.encode(f"{line}\n").ids][: len(whole)]
    monkeypatch.setattr(encoder, "PIECE", 400)
    found = cut.encode([text, "a", text]).tolist()
    end = [made.token_to_id(END)]
    assert found == [*whole, *end, *made.encode("a").ids, *end, *whole, *end]


def test_a_tokenizers_own_beginning_and_end_are_kept(place: Path, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(place / "bpe" / "tokenizer.json"))
    for template, count in ((f"<s> $A {END}", 1), ("<s> $A", 1), ("$A", 1)):
        special = [("<s>", made.token_to_id("<s>")), (END, made.token_to_id(END))]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=special
        )
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
        ids = Encoder(tokenizer, append_eos=True).encode(["one text"]).tolist()
        assert ids.count(tokenizer.eos) == count and ids[-1] == tokenizer.eos
        assert (ids[0] == special[0][1]) == template.startswith("<s>")


def test_files_at_urls_are_tokenized(
    place: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with serving() as web:
        for number, text in enumerate(texts):
            web.files[f"/{number}.txt"] = text.encode()
        names = ",".join(f"{web.url}{path}" for path in web.files)
        made = make(place, names, tmp_path / "set", "--seq_len=128")
        assert rows(made) == expected(place, texts, 128)
        with pytest.raises(RequestError, match=r"^--dataset: .*none.txt cannot be read: "):
            make(place, f"{web.url}/none.txt", tmp_path / "none")


def test_paths_may_begin_with_the_home_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell does not expand --name=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bpe").symlink_to(place / "bpe")
    (tmp_path / "texts").mkdir()
    write_txt(tmp_path / "texts", ["some words " * 99])
    asked = ("--dataset=~/texts", "--tokenizer=~/bpe", "--num_proc=1")
    tokenize([*asked, "--save_path=~/set", "--seq_len=16"])
    pack([*asked, "--save_path=~/packed.npy"])
    assert (tmp_path / "set").is_dir() and (tmp_path / "packed.npy").is_file()
    with pytest.raises(RequestError, match=r"--save_path: must be a path, with \./ before a ~"):
        tokenize([*asked, "--save_path=~no-such-user/set"])


def test_a_tokenizer_without_an_end_of_text_is_a_warning(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 99)
    words = tokenizers.models.WordLevel({"some": 0, "words": 1}, unk_token="some")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    asked = [f"--dataset={tmp_path}/a.txt", "--num_proc=1", "--seq_len=1"]
    mine = f"--tokenizer={tmp_path}"
    tokenize([*asked, mine, f"--save_path={tmp_path}/set"])
    assert f"warning: {tmp_path} states no end-of-text token" in capsys.readouterr().err
    for flag in ("--append_eos=False", "--tokenizer=bytes", f"--tokenizer={place}/bpe"):
        tokenize([*asked, mine, flag, f"--save_path={tmp_path}/{flag[-5:]}"])
        assert "end-of-text" not in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(RequestError, match=r"^--tokenizer: .* '<end>', is not in its vocabulary"):
        tokenize([*asked, mine, f"--save_path={tmp_path}/other"])


def test_large_sets_are_of_several_files(
    place: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "FILE_TOKENS", 10_000)
    monkeypatch.setattr(blocks, "BATCH_TOKENS", 3000)
    made = make(place, write_txt(tmp_path, texts), tmp_path / "set", "--seq_len=128")
    right = expected(place, texts, 128)
    assert len(list(made.glob("data-*.arrow"))) == -(-len(right) // (10_000 // 128)) > 3
    assert rows(made) == right
    samples = Arrow(str(made), 64)
    assert list(chain.from_iterable(samples[at].inputs.tolist() for at in range(len(samples)))) == (
        list(chain.from_iterable(right))
    )


def test_a_longer_row_than_the_tokenizer_states_is_a_warning(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 3000)
    made = make(place, f"{tmp_path}/a.txt", tmp_path / "set", "--seq_len=4096")
    assert "4096 is more than the 2048 that" in capsys.readouterr().err
    assert {len(row) for row in rows(made)} == {4096}


def test_wrong_requests_are_reported_in_a_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}')
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("short")
    (tmp_path / "d.xyz").write_text("x")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "there").mkdir()
    there, new = f"--save_path={tmp_path}/there", f"--save_path={tmp_path}/set"

    def shown(match: str, *flags: str) -> None:
        with pytest.raises(RequestError, match=match) as raised:
            tokenize([f"--tokenizer={place}/bpe", "--num_proc=1", *flags])
        assert "\n" not in str(raised.value)

    a, b = f"--dataset={tmp_path}/a.jsonl", f"--dataset={tmp_path}/b.txt"
    shown("--dataset: no file matches", f"--dataset={tmp_path}/none", new)
    shown("of several kinds", f"--dataset={tmp_path}/*", new)
    shown("no file with a known ending", f"--dataset={tmp_path}/d.xyz", new)
    shown("no file with a known ending", f"--dataset={tmp_path}/there", new)
    shown("bad.json cannot be read", f"--dataset={tmp_path}/bad.json", new)
    shown("cannot be read: there is nothing in it", f"--dataset={tmp_path}/none.jsonl", new)
    shown("no column 'text'; there are: body, n", a, new)
    shown("a.jsonl has int64, not text, in column 'n'", a, new, "--text_column=n")
    shown("has no text", b, new)
    shown(
        "--seq_len: 4,096 is more than the [0-9]+ tokens.*fix", f"--dataset={tmp_path}/c.txt", new
    )
    shown("already exists", a, there)
    shown("has no configuration 'en'", a, new, "--dataset_config=en")
    shown(r"^--split: .*no split 'test'; there are: train \(1 file\)", a, new, "--split=test")
    shown("--num_proc: must be at least 1, not '0'", a, new, "--num_proc=0")
    shown("--seq_len: must be at least 1", a, new, "--seq_len=0")
    shown(
        "none/tokenizer.json does not exist", a, new, f"--tokenizer={tmp_path}/none/tokenizer.json"
    )
    shown("cannot be read", a, new, f"--tokenizer={tmp_path}/d.xyz")
    shown("bytes states no end-of-text", a, new, "--tokenizer=bytes", "--append_eos")
    shown("did you mean --dryrun", a, new, "--dry_run")
    shown("--save_path: must be given", a)
    assert not (tmp_path / "set").exists()
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ('{"model_max_length": "4k"}', "its model_max_length is '4k', and must be a number"),
        ('{"model_max_length": [1]}', "its model_max_length is .1., and must be a number"),
        ('{"model_max_length": NaN}', "its model_max_length is nan, and must be a number"),
        ('{"eos_token": ["a"]}', "its end-of-text token, ..a.., is not in its vocabulary"),
        ('{"eos_token": 7}', "its end-of-text token, 7, is not in its vocabulary"),
    ],
)
def test_what_a_tokenizer_states_wrongly_is_said(
    place: Path, tmp_path: Path, stated: str, message: str
) -> None:
    shutil.copy(place / "bpe" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(stated)
    with pytest.raises(RequestError, match=f"^--tokenizer: {tmp_path}: {message}"):
        open_tokenizer(str(tmp_path))


def test_a_tokenizer_may_state_that_it_has_no_limit(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "bpe" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": Infinity}')
    assert open_tokenizer(str(tmp_path)).longest is None


@pytest.mark.parametrize("texts", [1, 3000])
def test_a_text_that_is_not_in_utf_8_is_named(place: Path, tmp_path: Path, texts: int) -> None:
    """The library's JSON reader accepts it, but Python cannot read it."""
    lines = [b'{"text": "%s"}' % (b"a" * 200)] * texts
    lines[-1] = b'{"text": "caf\xe9 au lait"}'
    (tmp_path / "latin.jsonl").write_bytes(b"\n".join(lines))
    match = f"--dataset: text {texts:,} of {texts:,} is not in UTF-8 .byte 3 of it: .*fix:"
    flags = ("--tokenizer=bytes", f"--dataset={tmp_path}/latin.jsonl", "--num_proc=1")
    for command, save in ((tokenize, "set"), (pack, "packed.npy")):
        with pytest.raises(RequestError, match=match):
            command([*flags, f"--save_path={tmp_path}/{save}"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ('{"text": "x', "cannot be read: JSON parse error: .*; fix: correct the file, or .*"),
        ('{"body": "x"}', "has no column 'text'; there are: body; fix: .*"),
        ('{"text": 5}', "has int64, not text, in column 'text'; fix: .*"),
        ('{"text": "x"}\n{"text": 5}', "has text and other values, not text, in column .*; fix: "),
        ('{"text": ["x"]}\n{"text": "x"}', "has text and other .*, not text, in column .*; fix: "),
    ],
)
def test_of_many_files_the_wrong_one_is_named(
    tmp_path: Path, wrong: str, reason: str, packed: bool
) -> None:
    folder, ending = tmp_path / "many", ".jsonl.gz" if packed else ".jsonl"
    folder.mkdir()
    for name in "abc":
        text = (wrong if name == "b" else '{"text": "x"}').encode()
        (folder / f"{name}{ending}").write_bytes(gzip.compress(text) if packed else text)
    flags = ("--tokenizer=bytes", f"--dataset={folder}", "--num_proc=1")
    with pytest.raises(RequestError, match=f": {folder}/b{ending} {reason}"):
        tokenize([*flags, f"--save_path={tmp_path}/set"])


def test_files_of_parquet_have_the_same_columns(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for name, more in (("a", {}), ("b", {"n": [1]})):
        datasets.Dataset.from_dict({"text": ["x"], **more}).to_parquet(folder / f"{name}.parquet")
    columns = r"its columns \(text, n\) are not those of the first file \(text\); fix: .*"
    with pytest.raises(RequestError, match=f": {folder}/b.parquet cannot be read: {columns}$"):
        tokenize(["--tokenizer=bytes", f"--dataset={folder}", f"--save_path={tmp_path}/set"])


def test_files_of_json_may_have_other_columns_beside_the_text(tmp_path: Path) -> None:
    """For example notes on their origin; the library takes the first file's columns for all."""
    folder = tmp_path / "many"
    folder.mkdir()
    notes: list[dict[str, object]] = [
        {},
        {"source": {"url": "u", "page": 1}},
        {"source": "a name", "date": "2024-01-01"},
        {"id": 7, "text": None},
    ]
    for number, note in enumerate(notes):
        lines = [{"text": f"{number}.{line};", **note} for line in range(3)]
        (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    flags = ("--tokenizer=bytes", f"--dataset={folder}", "--num_proc=1", "--seq_len=36")
    tokenize([*flags, f"--save_path={tmp_path}/set"])
    (ids,) = rows(tmp_path / "set")
    places = [f"{file}.{line};" for file in range(3) for line in range(3)]
    assert bytes(ids).decode() == "".join(places)


@pytest.mark.processes
def test_what_is_not_on_this_machine_is_reported_in_a_line(place: Path, tmp_path: Path) -> None:
    for flag, name in (("dataset", "no-such-set"), ("tokenizer", "no/such-tokenizer")):
        base = (f"--dataset={tmp_path}", f"--save_path={tmp_path}/set", "--seq_len=512")
        wrong = run(place, *base, f"--{flag}={name}")
        assert wrong.returncode == 2
        assert wrong.stderr.startswith(
            f"error: --{flag}: {name} is not a local file or folder, and"
        )
        assert wrong.stderr.count("\n") == 1
    assert "Exit codes:" in run(place, "--help").stdout
