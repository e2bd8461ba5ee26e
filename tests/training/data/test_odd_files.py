"""Files of texts that are empty, or that the library datasets does not read as texts."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from tests.training.data import test_stream
from tests.training.data.test_splits import cache as cache
from tests.training.data.test_tokenize import rows
from training.data.tokenize.__main__ import tokenize
from training.data.tokenize.texts import open_texts
from training.errors import RequestError, TrainingError

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
FLAGS = ("--tokenizer=bytes", "--num_proc=1", "--seq_len=3")


@pytest.mark.parametrize("empty", ["a", "b", "c"])
def test_a_parquet_file_may_have_no_rows(tmp_path: Path, empty: str) -> None:
    """Pandas and pyarrow write one row group without rows then, for a part that has none."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in "abc":
        texts = [] if name == empty else [f"<{name}>"]
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, folder / f"{name}.parquet")
    read = "".join(f"<{name}>" for name in "abc" if name != empty)
    tokenize([*FLAGS, f"--dataset={folder}", f"--save_path={tmp_path}/set"])
    assert bytes(chain.from_iterable(rows(tmp_path / "set"))).decode() == read
    (lane,) = test_stream.texts(f"stream:{folder}", batch=1)
    assert sorted(lane) == sorted(read)


def test_of_a_folder_the_library_reads_no_endings_in_capital_letters(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("one text")
    flags = (*FLAGS, f"--save_path={tmp_path}/set")
    with pytest.raises(RequestError, match=r"small letters, .*A\.TXT; fix: .*'.*/\*\*/\*\.TXT'"):
        tokenize([*flags, f"--dataset={tmp_path}"])
    tokenize([*flags, f"--dataset={tmp_path}/**/*.TXT"])
    assert bytes(chain.from_iterable(rows(tmp_path / "set"))).decode() == "one te"


@pytest.mark.parametrize("ending", ["md", "tar", "html"])
def test_of_files_that_are_not_read_as_texts_the_known_endings_are_named(
    tmp_path: Path, ending: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.{ending}").write_text("What I wrote.\n")
    match = "mine has no file with a known ending; those are .txt, .* fix: "
    with pytest.raises(RequestError, match=match):
        tokenize([*FLAGS, f"--dataset={folder}", f"--save_path={tmp_path}/set"])
    with pytest.raises(RequestError, match=match):
        test_stream.feed(f"stream:{folder}", batch=1)


def test_a_stream_that_lacks_documents_as_a_file_is_empty_says_so(tmp_path: Path) -> None:
    """Each sequence of a step reads files of its own, and one of the two has only this one."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "What I wrote."}\n' * 30)
    (folder / "b.jsonl").write_text("")
    feed = test_stream.feed(f"stream:{folder}", batch=2)
    with pytest.raises(TrainingError, match=r"2, which reads .*/b\.jsonl; fix: leave out files"):
        feed.next_rows(range(2))


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_rows_without_text_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """They may be texts in a column of another name."""
    lines = {
        "jsonl": ['{"text": "one"}', '{"content": "two"}', '{"text": null}', '{"text": ""}'],
        "csv": ["text,content", "one,1", ",two", ",3", '" ",4'],
    }[ending]
    (tmp_path / f"a.{ending}").write_text("\n".join(lines) + "\n")
    found = open_texts(str(tmp_path))
    assert found.read(0, len(found))[:3] == ["one", "", ""]
    assert (
        f"warning: 2 of 4 rows of {tmp_path} have nothing in column 'text': each is an empty text"
        in capsys.readouterr().err
    )


def test_texts_that_are_empty_are_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n\n\ntwo\n")
    assert len(open_texts(str(tmp_path), sample_by="line")) == 4
    assert "warning" not in capsys.readouterr().err


CELLS = ("NA", "null", "None", "nan", "007", "1e5", "3", "2020-01-01", "True", " x ")


@pytest.mark.parametrize("those", [CELLS, CELLS[:4], CELLS[4:7], CELLS[:1], CELLS[7:8]])
def test_texts_of_csv_are_what_is_written_there(tmp_path: Path, those: tuple[str, ...]) -> None:
    """Words such as NA are no missing texts, and digits no numbers, alone or among other texts."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.csv").write_text("id,text\n" + "".join(f"1,<{{{t}}}>\n" for t in "ab"))
    (folder / "b.csv").write_text("id,text\n" + "".join(f"2,{cell}\n" for cell in those))
    for name in ("b.csv", ""):
        read = ("<{a}><{b}>" if not name else "") + "".join(those)
        made = tmp_path / f"set-{name}"
        tokenize([*FLAGS[:2], "--seq_len=1", f"--dataset={folder}/{name}", f"--save_path={made}"])
        assert bytes(chain.from_iterable(rows(made))).decode() == read
        (lane,) = test_stream.texts(f"stream:{folder}/{name}", batch=1)
        assert sorted(lane) == sorted(read)


def test_files_of_csv_may_have_only_a_header_or_other_columns_beside_the_text(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.csv").write_text("text,id\n")
    (folder / "b.csv").write_text("text,id\n<b>,1\n")
    (folder / "c.csv").write_text("place,text\nhere,<c>\n")
    tokenize([*FLAGS, f"--dataset={folder}", f"--save_path={tmp_path}/set"])
    assert bytes(chain.from_iterable(rows(tmp_path / "set"))).decode() == "<b><c>"
    (folder / "d.csv").write_text("title,id\nT,1\n")
    with pytest.raises(
        RequestError, match=r"--text_column: .*d\.csv has no column 'text'; there are: id, title"
    ):
        tokenize([*FLAGS, f"--dataset={folder}", f"--save_path={tmp_path}/other"])
    with pytest.raises(TrainingError, match=r"no column 'text'; there are: id, title; fix: "):
        test_stream.texts(f"stream:{folder}", batch=1)


def test_a_cell_of_csv_without_a_text_is_no_text_of_a_stream(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,one\n2,\n")
    with pytest.raises(TrainingError, match=r"document 2 has no text"):
        test_stream.texts(f"stream:{tmp_path}/a.csv", batch=1)


def test_rows_of_csv_with_more_fields_than_the_header_are_refused(tmp_path: Path) -> None:
    """Pandas would read the texts of another column."""
    (tmp_path / "a.csv").write_text("text,id\none, two,1\nthree, four,2\n")
    match = r"a\.csv cannot be read: its rows have more fields than its header; fix: "
    with pytest.raises(RequestError, match=match):
        tokenize([*FLAGS, f"--dataset={tmp_path}/a.csv", f"--save_path={tmp_path}/set"])
    with pytest.raises(TrainingError, match=match):
        test_stream.texts(f"stream:{tmp_path}/a.csv", batch=1)
