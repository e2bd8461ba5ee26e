"""Files of texts, by their endings: which there are, and which builder of datasets reads them."""

from __future__ import annotations

from collections.abc import Sequence
from glob import has_magic, iglob
from pathlib import Path, PurePosixPath

from training.errors import RequestError

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
PACKED = (".gz", ".zst", ".xz", ".bz2")


def is_local(name: str) -> bool:
    """Whether files are meant, which may be missing, rather than a set of the hub."""
    return Path(name).exists() or has_magic(name) or name.startswith((".", "/", "~"))


def find_files(name: str) -> tuple[str, list[str]]:
    """Find the files of a folder or a pattern, sorted, and their builder. Raises RequestError."""
    pattern = f"{name}/**/*" if Path(name).is_dir() else name
    found = sorted(path for path in iglob(pattern, recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not found:
        raise RequestError(f"no file matches {pattern}")
    return builder_of(name, found)


def builder_of(name: str, paths: Sequence[str]) -> tuple[str, list[str]]:
    """Choose the builder by the endings; the files that it reads. Raises RequestError."""
    known: dict[str, list[str]] = {}
    for path in paths:
        endings = [end for end in PurePosixPath(path).suffixes if end not in PACKED]
        if endings and endings[-1] in BUILDERS:
            known.setdefault(BUILDERS[endings[-1]], []).append(path)
    if not known:
        raise RequestError(
            f"{name} has no file that is known by its ending; "
            f"they are {', '.join(BUILDERS)}, also with {', '.join(PACKED)}"
        )
    if len(known) > 1:
        raise RequestError(
            f"{name} has files of several kinds ({', '.join(sorted(known))}); "
            f"name one with a pattern, such as '{name}/**/*.txt'"
        )
    ((builder, files),) = known.items()
    return builder, files
