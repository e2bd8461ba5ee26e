"""Download a file over https or from a folder: resume partial downloads, verify the checksum."""

from __future__ import annotations

import base64
import ssl
import string
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote, urlsplit

from sqshforge.errors import MissingError, RequestError, SqshforgeError, WorkError
from sqshforge.host.files import sha256
from sqshforge.host.resources import FULL
from sqshforge.host.terminal import Tracker
from sqshforge.network.access import Pip, ca_bundle
from sqshforge.network.mirrors import bare, first_given

TRIES = 4
PAUSE = 2.0  # seconds before the next try, times the number of tries so far
TIMEOUT = 60.0  # seconds without a byte
PIECE = 1 << 20
ABSENT = "cannot be fetched: "
FIX = "check the network and the proxy, or name a mirror (docs/images/offline.md)"
RANGE_BEYOND_END = 416  # the part was already complete


class RefusedError(MissingError):
    """All hosts that were asked for a file answer, but none provides it."""


def download(url: str, place: Path, wanted: str | None, pip: Pip, tracker: Tracker) -> str:
    """Fetch a file to `place`, and return its sha256, which is `wanted` if that is given.

    An existing file with that sum is not fetched again; one with another sum, from an earlier lock
    or damaged, is kept until the right one has arrived. A partial download is kept beside it, and
    is resumed if a sum can verify the whole. Raises `MissingError` if the host does not provide the
    file, `RequestError` if the address is invalid, `WorkError` if the sum is wrong, `OSError` if
    the file cannot be written.
    """
    if place.is_file():
        total = sha256(place)
        if wanted in (None, total):
            return total
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{place.name}.part")
    if wanted is None:
        part.unlink(missing_ok=True)
    was_there = part.is_file()
    total = _fetched(url, part, pip, tracker)
    if was_there and total != wanted:  # it may be a part of another file, or damaged
        part.unlink()
        total = _fetched(url, part, pip, tracker)
    if wanted not in (None, total):
        part.unlink()
        raise _wrong(place.name, wanted, total, bare(url))
    part.rename(place)
    return total


def download_from(
    urls: Sequence[str], place: Path, wanted: str | None, pip: Pip, tracker: Tracker
) -> str:
    """Fetch a file as `download` does, from the first of its addresses that provides it.

    Raises `MissingError` naming every address if none does, and its subclass `RefusedError` if all
    of them answer. A wrong sum is reported at once, and no further address is tried.
    """
    total, failed = first_given(
        urls, lambda url: download(url, place, wanted, pip, tracker), MissingError
    )
    if total is not None:
        return total
    if len(failed) == 1:
        raise failed[0]
    said = "\n".join(f"    {one.where}: {one.what.removeprefix(ABSENT)}" for one in failed)
    if all(isinstance(one, RefusedError) for one in failed):
        raise RefusedError(f"no address of {place.name} gives it:\n{said}", fix=FIX)
    raise MissingError(
        f"{place.name} cannot be fetched from any of its {len(failed)} addresses:\n{said}",
        fix=FIX,
    )


def _fetched(url: str, part: Path, pip: Pip, tracker: Tracker) -> str:
    """Complete the part and return its sum; if that fails, remove an empty part."""
    try:
        _fetch(url, part, pip, tracker)
    except SqshforgeError:
        if not part.stat().st_size:
            part.unlink()
        raise
    return sha256(part)


def _fetch(url: str, part: Path, pip: Pip, tracker: Tracker) -> None:
    """Complete the part, resuming when a connection is cut."""
    bundle = ca_bundle(pip)
    context = ssl.create_default_context(cafile=str(bundle) if bundle else None)
    for tried in range(1, TRIES + 1):
        file = part.open("ab")  # an error here is not the network's fault
        try:
            with file, _answer(url, file.tell(), context, pip) as answer:
                _append(answer, file, tracker)
            return
        except urllib.error.HTTPError as error:
            if error.code == RANGE_BEYOND_END:
                return
            raise RefusedError(
                f"{ABSENT}the host answers {error.code} {error.reason}", where=bare(url), fix=FIX
            ) from None
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, str(part)) from None
            reason = getattr(error, "reason", None) or error
            # If not a single byte came, another try will not help.
            if tried == TRIES or not part.stat().st_size:
                raise _absent(url, str(reason)) from None
        except ValueError as error:
            raise RequestError(
                f"this address cannot be used: {error}",
                where=bare(url),
                fix="correct it in the recipe or in the mirrors (docs/images/offline.md)",
            ) from None
        time.sleep(PAUSE * tried)


def _answer(url: str, start: int, context: ssl.SSLContext, pip: Pip) -> IO[bytes]:
    is_path = url.startswith("/")  # from a mirror
    address = Path(url).as_uri() if is_path else quote(bare(url), safe=string.punctuation)
    request = urllib.request.Request(address, headers={"User-Agent": "sqshforge"})
    parts = urlsplit(url)
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        secret = base64.b64encode(pair.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {secret}")
    if start:
        request.add_header("Range", f"bytes={start}-")
    # Addresses come from recipes and mirrors, which allow http, https and file.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if pip.proxy:
        through = dict.fromkeys(("http", "https"), pip.proxy)
        handlers.append(urllib.request.ProxyHandler(through))
    opener = urllib.request.build_opener(*handlers)
    answer: IO[bytes] = opener.open(request, timeout=TIMEOUT)
    return answer


def _append(answer: IO[bytes], file: IO[bytes], tracker: Tracker) -> None:
    status = getattr(answer, "status", None)
    if status != 206 and file.tell():  # the server ignores Range and sends everything
        file.truncate(0)
        file.seek(0)
    length = int(getattr(answer, "headers", {}).get("Content-Length") or 0)
    start = file.tell()
    tracker.set(start, start + length if length else None)
    while piece := answer.read(PIECE):
        file.write(piece)
        tracker.advance(len(piece))
    file.flush()
    if length and file.tell() < start + length:
        raise OSError(f"the connection was cut after {file.tell()} bytes")


def _absent(url: str, why: str) -> MissingError:
    return MissingError(
        f"{ABSENT}{why}",
        where=bare(url),
        fix=FIX,
    )


def _wrong(name: str, wanted: str | None, found: str, where: str) -> WorkError:
    return WorkError(
        f"{name} has another checksum than the lock says:\n"
        f"    locked  {wanted}\n    found   {found}",
        where=where,
        fix="do not use it: ask who changed it; if the change of an archive is intended, write the "
        "new sum as archives.NAME.sha256 in the recipe, then sqshforge lock TARGET",
    )
