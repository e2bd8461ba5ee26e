"""JSON from somebody else: of bounded size and depth, and of the shapes that are asked for."""

from __future__ import annotations

import json
from typing import Any

from sqshforge.image.region import Region
from sqshforge.tar import limits
from sqshforge.tar.faults import broken


class Document:
    """An object of a JSON file; what is asked of it is there in that shape, or `WorkError`."""

    def __init__(self, value: Any, what: str, where: str) -> None:
        self._what = what
        self._where = where
        if not isinstance(value, dict):
            raise self.fault("is no object")
        self.value: dict[str, Any] = value

    def fault(self, why: str) -> Exception:
        return broken(f"{self._what} {why}", self._where)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fault(f"has no text as {key!r}")
        return value

    def number(self, key: str) -> int:
        value = self.value.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fault(f"has no size as {key!r}")
        return value

    def texts(self, key: str) -> list[str]:
        return [one for one in self._list(key) if self._is(isinstance(one, str), key)]

    def map(self, key: str) -> Document:
        return Document(self.value.get(key) or {}, f"{key!r} of {self._what}", self._where)

    def maps(self, key: str) -> list[Document]:
        what = f"one of {key!r} in {self._what}"
        return [Document(one, what, self._where) for one in self._list(key)]

    def _list(self, key: str) -> list[Any]:
        value = self.value.get(key)
        self._is(value is None or isinstance(value, list), key)
        return value or []

    def _is(self, is_right: bool, key: str) -> bool:
        if not is_right:
            raise self.fault(f"has something else than it should as {key!r}")
        return True


def load(data: bytes, what: str, where: str) -> Any:
    """The value that JSON stands for."""
    try:
        value = json.loads(data.decode(), parse_int=_number)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise broken(f"{what} is nested too deep", where) from None
    except ValueError:  # of JSON, of UTF-8, of half a character
        raise broken(f"{what} is no JSON", where) from None


def read(region: Region, what: str, where: str) -> Document:
    return Document(load(region.whole(limits.JSON, what), what, where), what, where)


def _number(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError
    return int(digits)
