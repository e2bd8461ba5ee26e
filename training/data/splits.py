"""Local texts by split: which files of a folder are trained on, and which are held out.

A folder is split as `datasets.load_dataset(folder)` does it, by that library itself: by the
configurations in the front matter of its README.md, else by the names of its files and folders,
else all of it is `train`. A set on disk (`save_to_disk`) has the splits that it was saved with.
Files that are named one by one, or by a pattern, are one split, `train`.

All files of a split are of one kind, in an order that depends only on their names. No torch here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape, has_magic, iglob
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from training.data.libraries import datasets_library
from training.data.remote import is_url, matching_urls
from training.errors import RequestError

BUILDERS = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
TEXT = "text"
TRAIN, VALIDATION = "train", "validation"
READ_BY = "texts are read"
CARDS = ("README.md", ".huggingface.yaml")
"""Files of a folder that may state which of the others belong to which split."""
ROWS_AT_ONCE = 1_000
"""The most rows of a parquet file that are read at once: long texts take much memory."""
SHOWN = 3
"""The most files that a line names."""
NAMED_FOR = re.compile(
    r"(?:^|[-._ 0-9/])(?:(train|training)|validation|valid|val|dev|test|testing|eval|evaluation)"
    r"(?=[-._ 0-9/])"
)
"""A split's name in a path, as the library finds it; the group matches names for training."""


class NoSplit(RequestError):  # noqa: N818 - said as it is
    """The requested split does not exist."""


@dataclass(frozen=True)
class LocalTexts:
    """Local texts under a name, with their files by split.

    source: what the library opens, a folder or one of its builders. is_saved: whether it is a set
    on disk. left_out: files of a folder that could be read but are in no split.
    """

    name: str
    source: str
    splits: Mapping[str, tuple[str, ...]]
    config: str = ""
    is_saved: bool = False
    left_out: tuple[str, ...] = ()

    def files(self, split: str) -> tuple[str, ...]:
        """Return the files of a split. Raises NoSplit naming those there are, or RequestError."""
        if split not in self.splits:
            there = ", ".join(f"{name} ({_count(files)})" for name, files in self.splits.items())
            raise NoSplit(
                f"{self.name} has no split {split!r}; there are: {there or 'none'}"
                + (f"; {self._in_none()}" if self.left_out else "")
            )
        if not self.splits[split]:
            raise RequestError(f"{self.name}: split {split!r} has no rows; fix: give another set")
        return self.splits[split]

    def load(
        self,
        split: str,
        column: str = TEXT,
        *,
        streaming: bool = False,
        sample_by: str = "document",
    ) -> Any:
        """Open a split by the library; of files, it may also be a part such as train[:10%].

        column: what is read of JSON and CSV files; other kinds are read with all columns.
        sample_by: what counts as a text in .txt files. Raises RequestError for a split that does
        not exist or files that are not texts, and whatever the library raises.
        """
        datasets = datasets_library(READ_BY)
        if self.is_saved:
            self.files(split)
            folder = Path(self.source)
            has_splits = (folder / "dataset_dict.json").is_file()
            return datasets.load_from_disk(str(folder / split if has_splits else folder))
        names = [part.partition("[")[0].strip() for part in split.split("+")]
        files = {name: [escape(path) for path in self.files(name)] for name in names}
        options: dict[str, Any] = {"data_files": files, "split": split, "streaming": streaming}
        kinds = {kind_of(path) for name in names for path in self.files(name)}
        if kinds == {"text"}:
            # Some editors begin UTF-8 files with a byte order mark, which is not part of the text.
            options |= {"sample_by": sample_by, "keep_linebreaks": True, "encoding": "utf-8-sig"}
        if kinds == {"parquet"}:
            # By default it is as many as the first row group has, and none is refused.
            options["batch_size"] = ROWS_AT_ONCE
        if kinds == {"csv"}:
            # Pandas makes numbers of digits, and missing values of NA, null, None and nan.
            options |= {"keep_default_na": False, "na_values": [""]}
        if self.source == "json" or kinds == {"csv"}:
            options["features"] = datasets.Features({column: datasets.Value("string")})
        try:
            return datasets.load_dataset(self.source, self.config or None, **options)
        except Exception as error:
            if any(kinds):
                raise
            # The library takes .md and .tar files for parts of something else.
            raise _no_texts(self.name) from error

    def described(self, split: str) -> str:
        """Describe what a split is read from."""
        return f"split {split!r} of {self.name}: {shown(self.files(split))}"

    def warnings(self, split: str) -> list[str]:
        """List what users may not expect of a split."""
        found = [f"{self.name}: {self._in_none()}"] if self.left_out else []
        for other, files in self.splits.items():
            if other != split and (both := {*self.files(split)} & {*files}):
                shared = f"shares files with {other!r}: {shown(sorted(both))}"
                found.append(f"{self.name}: split {split!r} {shared}")
        return found

    def _in_none(self) -> str:
        return (
            f"in no split, so not read: {shown(self.left_out)} (only files of the most frequent "
            "kind are read, and where names tell a split, only those; files named by a pattern "
            "are all read)"
        )


def is_local(name: str) -> bool:
    """Return whether files (even missing ones) or URLs are meant, not a set of the hub."""
    # Not by pathlib, which raises for names that are too long, as many with commas are.
    return is_url(name) or any(
        os.path.exists(one) or has_magic(one) or one.startswith((".", "/", "~"))  # noqa: PTH110
        for one in (name, *name.split(","))
    )


def find(name: str, config: str = "") -> LocalTexts:
    """Find the texts at a local path, or at patterns or URLs (separated by commas).

    config: the configuration to use of a folder that has several. Raises RequestError if there is
    nothing, or if it is unclear which files belong together.
    """
    if is_url(name):
        found = list(chain.from_iterable(map(named, name.split(","))))
        return _of_files(name, list(dict.fromkeys(found)), config)
    path = Path(name).expanduser()
    for mark in ("dataset_dict.json", "state.json"):
        if os.path.isfile(path / mark):  # noqa: PTH113
            _require_no_config(name, config)
            return LocalTexts(name, str(path), _saved_splits(path), is_saved=True)
    if os.path.isdir(path):  # noqa: PTH112
        # Absolute, as the library takes the bare name json for its builder.
        return _of_folder(name, path.absolute(), config)
    found = matching(name)
    if not found:
        found = list(chain.from_iterable(map(named, name.split(","))))
    return _of_files(name, list(dict.fromkeys(found)), config)


def matching(pattern: str) -> list[str]:
    """Find the files of a name or pattern, sorted; an existing file's name is never a pattern."""
    path = str(Path(pattern).expanduser())
    if os.path.isfile(path):  # noqa: PTH113 - it never raises
        return [path]
    return sorted(one for one in iglob(path, recursive=True) if Path(one).is_file())  # noqa: PTH207


def named(pattern: str) -> list[str]:
    """Find the files of a name, pattern or URL. Raises RequestError if there is none."""
    if files := matching_urls(pattern) if is_url(pattern) else matching(pattern):
        return files
    if os.path.isdir(pattern):  # noqa: PTH112
        folder = pattern.rstrip("/")
        raise RequestError(f"{pattern} is a folder; fix: name its files, as {folder}/**/*.txt")
    raise RequestError(f"no file matches {pattern}")


def shown(files: Sequence[str]) -> str:
    """Return the number of files and the names of a few."""
    more = f", ... {files[-1]}" if len(files) > SHOWN else ""
    return f"{_count(files)}: {', '.join(files[: SHOWN - bool(more)])}{more}"


def text_files(folder: Path) -> Iterator[str]:
    """Find all files below a folder that can be read as texts, except hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        for name in sorted(names):
            if kind_of(name) and not name.startswith((".", "__")):
                yield f"{place}/{name}"


def kind_of(path: str) -> str:
    """Return which builder reads a file, by its ending; empty if none does."""
    endings = [end for end in PurePosixPath(path).suffixes if end not in COMPRESSED]
    return BUILDERS.get(endings[-1].lower(), "") if endings else ""


def _count(files: Sequence[str]) -> str:
    return f"{len(files):,} file{'s' if len(files) != 1 else ''}"


def _require_no_config(name: str, config: str) -> None:
    if config:
        raise RequestError(
            f"{name} has no configuration {config!r}: only a folder whose README.md lists some, "
            "or a set on the hub, has any; fix: leave it out"
        )


def _of_files(name: str, paths: Sequence[str], config: str) -> LocalTexts:
    """Take the named files as one split. Raises RequestError for files of several kinds."""
    _require_no_config(name, config)
    _require_plain(paths)
    known: dict[str, list[str]] = {}
    for path in paths:
        known.setdefault(kind_of(path), []).append(path)
    known.pop("", None)
    if not known:
        raise _no_texts(name)
    if len(known) > 1:
        raise RequestError(
            f"{name} has files of several kinds ({', '.join(sorted(known))}); fix: name those of "
            "one by their ending, as FOLDER/**/*.jsonl"
        )
    ((builder, files),) = known.items()
    if builder != "text":  # a file of text is one document, which may be called anything
        _require_one_split(name, files)
    return LocalTexts(name, builder, {TRAIN: tuple(files)})


def _require_plain(paths: Iterable[str]) -> None:
    """Refuse paths that the library takes for those of files in archives."""
    for path in paths:
        if "::" in path and not is_url(path):
            raise RequestError(
                f"{path} has :: in its path, which the library datasets takes for a file in an "
                "archive; fix: rename it"
            )


def _require_one_split(name: str, files: Iterable[str]) -> None:
    """Refuse files that are named for training together with files named for held-out splits."""
    files = [file if is_url(file) else str(Path(file).absolute()) for file in files]
    begin = os.path.commonprefix(files).rfind("/") + 1  # noqa: RUF071 - of URLs too
    first: dict[bool, str] = {}
    for file in files:
        found = {bool(match[1]) for match in NAMED_FOR.finditer(file[begin:])}
        if len(found) == 1:
            first.setdefault(found.pop(), file)
    if len(first) > 1:
        raise RequestError(
            f"{name} has files of several splits, by the names {first[True]} and {first[False]}; "
            "fix: name the folder, whose splits are kept apart, or the files of one split"
        )


def _no_texts(name: str) -> RequestError:
    return RequestError(
        f"{name} has no file with a known ending; "
        f"those are {', '.join(BUILDERS)}, also with {', '.join(COMPRESSED)}; "
        "fix: let files that are documents end in .txt, or write their texts to one of the others"
    )


def _of_folder(name: str, folder: Path, config: str) -> LocalTexts:
    if has_magic(str(folder)):
        raise RequestError(
            f"{name}: its path has a wildcard (*, ? or [), by which the library datasets "
            "would read other folders or none; fix: rename the folder, or name its files, as "
            f"{shlex.quote(f'{escape(str(folder))}/*.jsonl')}"
        )
    texts = list(text_files(folder))
    _require_plain(texts)
    has_card = any(_lists_configs(folder / card) for card in CARDS)
    below = len(str(folder))
    try:
        splits = {} if has_card else _unnamed(folder, [path[below:] for path in texts], config)
        splits = splits or _named(folder, config)
    except Exception as error:  # the library has many ways to say no
        raise _refused(name, folder, config, error) from error
    every = {path for files in splits.values() for path in files}
    if not every:
        raise _no_texts(name)
    kinds = {kind_of(path) for path in every}
    if has_card or kinds - set(BUILDERS.values()) or len(kinds) > 1:
        return LocalTexts(name, str(folder), splits, config)
    # The library's paths begin with the folder or, in earlier releases, with its link's target.
    roots = dict.fromkeys((folder, folder.resolve()))
    left_out = tuple(
        path
        for path in texts
        if every.isdisjoint(str(root / path[below:].lstrip("/")) for root in roots)
    )
    return LocalTexts(name, kinds.pop(), splits, left_out=left_out)


def _named(folder: Path, config: str) -> dict[str, tuple[str, ...]]:
    """Let the library find the splits of a folder. Raises what it raises."""
    builder = datasets_library(READ_BY).load_dataset_builder(str(folder), config or None)
    return {
        # A file that matches two of the library's patterns is listed twice, but read once.
        str(split): tuple(dict.fromkeys(map(str, files)))
        for split, files in (builder.config.data_files or {}).items()
        if files
    }


def _unnamed(folder: Path, texts: Sequence[str], config: str) -> dict[str, tuple[str, ...]]:
    """Find the files of a folder if no file's name names a split; else return none.

    The library would find the same, but by 25 searches instead of one: its patterns for each word
    of each split take a minute in a folder of many files. `texts` are paths below the folder.
    """
    datasets = datasets_library(READ_BY)
    words = [word for those in datasets.data_files.SPLIT_KEYWORDS.values() for word in those]
    if any(word in path for path in texts for word in (*words, "-of-")):
        return {}
    builder = datasets.load_dataset_builder(str(folder), config or None, data_files="**")
    kind = type(builder.config).__name__.removesuffix("Config").lower()
    files = tuple(str(path) for path in builder.config.data_files[TRAIN] if kind_of(path) == kind)
    return {TRAIN: files} if files else {}


def _lists_configs(card: Path) -> bool:
    try:
        return "configs:" in card.read_text(errors="replace")
    except OSError:
        return False


def _refused(name: str, folder: Path, config: str, error: Exception) -> RequestError:
    """Make the error that says why the library does not open a folder."""
    datasets = datasets_library(READ_BY)
    try:
        there = list(datasets.get_dataset_config_names(str(folder)))
    except Exception:  # the same fault again
        there = []
    if there not in ([], ["default"]) and config not in there:
        return RequestError(
            f"{name} has the configurations {', '.join(there)}"
            + (f", and no {config!r}" if config else "")
            + "; fix: name one with dataset_config"
        )
    if config and there == ["default"]:
        _require_no_config(name, config)
    texts = list(text_files(folder))
    if not texts:
        return _no_texts(name)
    if not any(PurePosixPath(path).suffixes[-1].islower() for path in texts):
        pattern = shlex.quote(f"{folder}/**/*{PurePosixPath(texts[0]).suffixes[-1]}")
        return RequestError(
            f"{name}: the library datasets reads a folder's files only if their endings are in "
            f"small letters, unlike that of {texts[0]}; fix: name the files, as {pattern}"
        )
    return RequestError(f"{name} cannot be read: {' '.join(str(error).split())}")


def _saved_splits(folder: Path) -> dict[str, tuple[str, ...]]:
    """Read a set on disk's files by split. Raises RequestError if the set is broken."""
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        return dict([_saved_files(folder)])
    try:
        names = [str(name) for name in json.loads(listing.read_text())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{listing} is broken or half-written: {error!r}") from error
    return {name: _saved_files(folder / name)[1] for name in names}


def _saved_files(folder: Path) -> tuple[str, tuple[str, ...]]:
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text())
        files = tuple(str(folder / file["filename"]) for file in state["_data_files"])
        # Instead of a name there may be a part, such as train[:10%], or several joined by +.
        parts = str(state.get("_split") or TRAIN).split("+")
        names = {part.partition("[")[0].strip() for part in parts}
        return names.pop() if len(names) == 1 else TRAIN, files
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is broken or half-written: {error!r}") from error
