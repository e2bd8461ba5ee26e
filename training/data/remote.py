"""Folders at URLs that the library fsspec knows, as s3://bucket/prefix (which takes s3fs)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training.errors import RequestError, TrainingError


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
def told(what: str) -> Iterator[None]:
    """Tell what goes wrong on the way to or from a URL in one line."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise TrainingError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
