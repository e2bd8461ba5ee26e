"""Folders at URLs that the library fsspec knows, such as s3://bucket/prefix (which needs s3fs).

Data at such a URL is copied to each node before it is read. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.sections import STREAM
from training.errors import RequestError, TrainingError

if TYPE_CHECKING:
    from training.config.config import Config
    from training.process_group import Group

LINES_SOURCE = "lines:"
VERSIONS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified")
"""File systems' names for a property that changes with a file's content."""
PARTIAL = ".partial"
ABANDONED = 86400.0
"""Seconds without a write after which a partial file counts as a killed copy's."""


def is_url(path: str) -> bool:
    """Return whether a path is a URL, with a protocol before ://."""
    return "://" in path


def open_url(url: str, setting: str) -> tuple[Any, str]:
    """Return a URL's file system and the path in it. Raises RequestError naming the setting."""
    try:
        return _opened(url)
    except RequestError as error:
        raise RequestError(f"{setting}: {error}") from error


def _opened(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing library, or an unknown protocol
        raise RequestError(f"{url} cannot be reached: {first_line(error)}") from error
    return found


def matching_urls(pattern: str) -> list[str]:
    """Find the files of a URL or of a pattern of URLs, sorted.

    A URL without wildcards is that of a file, which may be missing. Over http a ? begins a query,
    and files are found in pages that list them. Raises RequestError for an unknown protocol,
    TrainingError if the files cannot be listed.
    """
    signs = pattern.replace("?", "") if pattern.startswith(("http://", "https://")) else pattern
    if not has_magic(signs) or "::" in pattern:  # as zip://*.jsonl::URL, which no reader takes
        return [pattern]
    fs, path = _opened(pattern)
    with one_line_errors(f"{pattern} cannot be listed"):
        if fs.isfile(path):
            return [pattern]
        found = fs.glob(path, detail=True)
    files = sorted(one for one, about in found.items() if about["type"] == "file")
    return [fs.unstrip_protocol(one) for one in files]


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raise errors on the way to or from a URL as TrainingError, in one line."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise TrainingError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fetch_data(config: Config, group: Group, say: Callable[[str], None]) -> Config:
    """Copy data from URLs, and return settings that name the copies (a collective call).

    The first rank of each node copies to data_cache whatever is missing or outdated there.
    Raises RequestError for a URL without files, TrainingError if they cannot be copied.
    """
    data = config.data
    dataset, evaluation = (
        _fetch_source(source, setting, data.data_cache, group, say)
        for setting, source in (
            ("dataset_path", data.dataset_path),
            ("eval_dataset_path", data.eval_dataset_path),
        )
    )
    return replace(config, data=replace(data, dataset_path=dataset, eval_dataset_path=evaluation))


def _fetch_source(
    source: str, setting: str, cache: str, group: Group, say: Callable[[str], None]
) -> str:
    """Copy a source's files if it is at a URL; return the source to read instead."""
    url = source.removeprefix(LINES_SOURCE)
    if not is_url(url) or source.startswith(STREAM):
        return source
    say(f"{setting}: copying {url}")
    place = Path(cache) if cache else Path(tempfile.gettempdir(), "training-data")
    folder = place / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    count = group.together(lambda: _copy(url, folder, setting) if first else 0, copies=True)
    say(f"{setting}: {count} files in {folder}")
    if not source.startswith(LINES_SOURCE):
        return str(folder)
    last = url.rpartition("/")[2]  # a pattern of names selects among the copies, too
    means_names = has_magic(last) and "**" not in last
    return f"{LINES_SOURCE}{folder}/{last}" if means_names else f"{LINES_SOURCE}{folder}"


def _copy(url: str, folder: Path, setting: str) -> int:
    """Make a folder hold the files of a URL or of its pattern; return how many there are.

    A listing beside the folder has the version of each copy. Copies of other versions and of files
    that are gone are removed before it is written, so all copies match the listing from then on,
    even if the copying is killed. Hidden files that are not copies stay.
    """
    fs, root = open_url(url, setting)
    listing = folder.with_name(f"{folder.name}.json")
    with one_line_errors(f"{setting}: {url} cannot be copied to {folder}"):
        base, _, last = root.rpartition("/")
        is_pattern = any(sign in last for sign in "*?[")
        files = fs.glob(root, detail=True) if is_pattern else fs.find(root, detail=True)
        if not files:
            raise RequestError(f"{setting}: {url} has no files")
        is_folder = not is_pattern and root not in files
        names = {path: os.path.relpath(path, root if is_folder else base) for path in files}
        there = {names[path]: [about["size"], _version(about)] for path, about in files.items()}
        folder.mkdir(parents=True, exist_ok=True)
        before: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):
            before = json.loads(listing.read_text())
        _remove_others(folder, there, before)
        with _whole(listing) as half:
            half.write_text(json.dumps(there))
        for path, name in names.items():
            copy = folder / name
            if copy.is_file() and copy.stat().st_size == files[path]["size"]:
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _whole(copy) as half:
                fs.get_file(path, str(half))
    return len(files)


def _version(about: Mapping[str, Any]) -> str:
    """Return what changes with a file's content, as its file system states it; "" if nothing."""
    return next((str(about[key]) for key in VERSIONS if about.get(key)), "")


def _remove_others(folder: Path, there: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Remove outdated copies, and partial files that killed copies left."""
    for file in [one for one in folder.rglob("*") if one.is_file()]:
        name = file.relative_to(folder).as_posix()
        with suppress(FileNotFoundError):  # another node may copy to the same folder
            if name not in before and any(part.startswith(".") for part in Path(name).parts):
                since = time.time() - file.stat().st_mtime
                goes = file.suffix == PARTIAL and since > ABANDONED
            else:
                goes = name not in there or there[name] != before.get(name)
            if goes:
                file.unlink()


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a file to write, which gets the name `path` once it is complete."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield half
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
