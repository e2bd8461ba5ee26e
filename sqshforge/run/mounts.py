"""The host paths to bind into a container: --mount SRC:DST[:ro]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import RequestError


@dataclass(frozen=True)
class Mount:
    """A host path bound into the container."""

    source: Path
    target: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Parse SRC:DST or SRC:DST:ro|rw; `RequestError` for another form or a missing SRC."""
        source, _, rest = text.partition(":")
        target, _, flag = rest.partition(":")
        if not source or not target.startswith("/") or flag not in ("", "ro", "rw"):
            raise RequestError(
                f"{text!r} is not SRC:DST", where="--mount", fix="--mount /data:/data[:ro]"
            )
        try:
            path = Path(source).expanduser().absolute()
        except RuntimeError:  # ~NAME of an unknown user, or ~ of a user without a home
            raise RequestError(
                f"there is no such home: {source}", where=f"--mount {text}", fix="write its path"
            ) from None
        if not path.exists():
            raise RequestError(f"the path to mount does not exist: {path}", where=f"--mount {text}")
        return cls(path, target, flag == "ro")
