"""Folders at URLs that the library fsspec knows, as s3://bucket/prefix (which takes s3fs).

Data at such a URL is copied to each node before it is read. Light: no torch here.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config.sections import STREAM
from training.errors import RequestError, TrainingError

if TYPE_CHECKING:
    from training.config.config import Config
    from training.process_group import Group

LINES_SOURCE = "lines:"


def is_url(path: str) -> bool:
    """Tell whether a path is a URL: what stands before :// is how it is reached."""
    return "://" in path


def open_url(url: str, setting: str) -> tuple[Any, str]:
    """Give the file system of a URL, and the path in it. Raises RequestError naming the setting."""
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a library that is missing, or no such scheme
        raise RequestError(f"{setting}: {url} cannot be reached: {first_line(error)}") from error
    return found


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Tell what goes wrong on the way to or from a URL in one line."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise TrainingError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def fetch_data(config: Config, group: Group, say: Callable[[str], None]) -> Config:
    """Copy what is at URLs, and name the copies instead; a collective call.

    The first rank of each node copies, to data_cache; what is there in full is not copied again.
    Raises RequestError for a URL that has nothing, TrainingError where it cannot be copied.
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
    """Copy what a source is at, if that is a URL; the source that it is then."""
    url = source.removeprefix(LINES_SOURCE)
    if not is_url(url) or source.startswith(STREAM):
        return source
    say(f"{setting}: copying {url}")
    place = Path(cache) if cache else Path(tempfile.gettempdir(), "training-data")
    folder = place / hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    count = group.together(lambda: _copy(url, folder, setting) if first else 0)
    say(f"{setting}: {count} files in {folder}")
    return f"{LINES_SOURCE}{folder}" if source.startswith(LINES_SOURCE) else str(folder)


def _copy(url: str, folder: Path, setting: str) -> int:
    """Copy the files of a URL, or those that its pattern means; how many there are."""
    fs, root = open_url(url, setting)
    with one_line_errors(f"{setting}: {url} cannot be copied to {folder}"):
        base, _, last = root.rpartition("/")
        is_pattern = any(sign in last for sign in "*?[")
        files = fs.glob(root, detail=True) if is_pattern else fs.find(root, detail=True)
        for path, about in files.items():
            copy = folder / os.path.relpath(path, base if is_pattern else root)
            if copy.is_file() and copy.stat().st_size == about["size"]:
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            partial = copy.with_name(f".{copy.name}.{os.getpid()}.partial")
            fs.get_file(path, str(partial))
            partial.replace(copy)
    if not files:
        raise RequestError(f"{setting}: {url} has no files")
    return len(files)
