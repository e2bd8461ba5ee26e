"""Parse the image configs of engines and archives, in docker's or OCI's form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sqshforge.errors import WorkError
from sqshforge.image.enroot import ImageConfig, has_control
from sqshforge.project import NEWEST_EPOCH

# Steps that change nothing outside of /sqshforge, as histories show them (docker's two builders,
# buildah; the one without an instruction is buildah's, for a FROM alone).
ELSEWHERE = re.compile(
    r"/bin/sh -c #\(nop\)\s*$"
    r"|(/bin/sh -c #\(nop\) +)?(ARG|CMD|ENTRYPOINT|ENV|EXPOSE|HEALTHCHECK|LABEL|MAINTAINER|ONBUILD"
    r"|SHELL|STOPSIGNAL|USER|VOLUME)\b|.* /sqshforge(/|\s|$)"
)
# Steps that make no layer, and those that cannot change anything outside of /sqshforge: a RUN that
# mentions it may do more.
WITHOUT_LAYER = re.compile(
    r"(/bin/sh -c #\(nop\) +)?(ARG|CMD|ENTRYPOINT|ENV|EXPOSE|HEALTHCHECK|LABEL|MAINTAINER|ONBUILD"
    r"|SHELL|STOPSIGNAL|USER|VOLUME)\b"
)
WITHIN = re.compile(
    r"(/bin/sh -c #\(nop\) +)?(WORKDIR|(ADD|COPY)\s(.*\s)?)\s*/sqshforge(/\S*)?(\s+# buildkit)?\s*",
    re.DOTALL,
)
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NO_TIME = ("", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+00:00")  # none, or Go's zero time


@dataclass(frozen=True)
class Step:
    """One step of an image's history: its time (RFC 3339) and its instruction."""

    created: str
    instruction: str


def parse_config(
    config: dict[str, Any],
    *,
    reference: str,
    digest: str | None,
    created: str,
    size: int,
    layers: Sequence[str] = (),
    history: Sequence[Step] = (),
) -> ImageConfig:
    """Parse an image's config in docker's or OCI's form; absent or null keys count as empty.

    Raises `WorkError` for any other form, and for a volume with a control character.
    """
    with understanding(reference):
        return ImageConfig(
            reference=reference,
            digest=digest,
            created=parse_time(created),
            base_created=_base_created(history),
            size=size,
            layers=tuple(str(one) for one in layers),
            env=_words(config.get("Env")),
            entrypoint=_words(config.get("Entrypoint")),
            cmd=_words(config.get("Cmd")),
            workdir=str(config.get("WorkingDir") or ""),
            volumes=_volumes(config.get("Volumes") or {}, reference),
            labels=tuple(sorted((str(k), str(v)) for k, v in (config.get("Labels") or {}).items())),
        )


def _base_created(history: Sequence[Step]) -> int | None:
    """The time of the last step outside of /sqshforge; None if the history does not state it.

    Times of steps are optional, and may be missing in a base image that other tools made.
    """
    steps = [one for one in history if not ELSEWHERE.match(one.instruction)]
    if not steps or steps[-1].created in NO_TIME:
        return None
    return max(parse_time(one.created) for one in steps)


def layers_below(history: Sequence[Step], count: int) -> int:
    """How many of an image's `count` layers may touch more than /sqshforge, by its history.

    A history does not say which of its steps made a layer. Every step that can make one is assumed
    to have made one, except the steps at the top that stay within /sqshforge: the layers that are
    left are theirs. The history may be wrong or lack steps. Returns 0 if it gives no answer.
    """
    makers = [one.instruction for one in history if not WITHOUT_LAYER.match(one.instruction)]
    below = len(makers)
    while below and WITHIN.fullmatch(makers[below - 1]) and "/.." not in makers[below - 1]:
        below -= 1
    return below if 0 < below < count <= len(makers) else 0


@contextmanager
def understanding(reference: str) -> Iterator[None]:
    """Turn errors in parsing an engine's answer into a `WorkError`."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise WorkError(f"the image's config is invalid: {error}", where=reference) from None


def parse_time(text: str) -> int:
    """Parse an RFC 3339 time with any number of decimals to seconds since 1970; 0 for no text.

    A time later than a squash file can hold becomes the latest that it can, as for files in layers.
    """
    if not text:
        return 0
    # Python 3.10 accepts neither Z nor more than six decimals.
    whole = re.sub(r"\.\d+", "", text).replace("Z", "+00:00")
    seconds = int((datetime.fromisoformat(whole) - EPOCH).total_seconds())
    return min(max(0, seconds), NEWEST_EPOCH)


def _words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TypeError(f"a list of words was expected, not {value!r}")
    return tuple(str(word) for word in value)


def _volumes(found: Any, reference: str) -> tuple[str, ...]:
    if not isinstance(found, dict):
        raise TypeError(f"volumes as the keys of an object were expected, not {found!r}")
    for volume in found:
        # Each becomes a line of /etc/fstab, and readers of that differ in what ends a line.
        if has_control(volume):
            raise WorkError(
                f"the image is refused: its volume {volume!r} has a control character",
                where=reference,
                fix="rebuild the image with another VOLUME",
            )
    return tuple(sorted(found))


def steps(history: Any) -> list[Step]:
    """The steps of an image config's history."""
    return [Step(one.get("created") or "", one.get("created_by") or "") for one in history or ()]
