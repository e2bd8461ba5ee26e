"""Triton's compiled kernels: a job's folder begins with those that are there, and may be kept.

A cold cache costs minutes at the first step of a large model. An image may carry a warm one
(`/sqshforge/triton-cache`), or a folder of the host is named. Keys are made of all that decides a
kernel (source, Triton's version, device), so that a cache of other kernels is only of no use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

SEED, SAVE = "TRITON_CACHE_SEED", "TRITON_CACHE_SAVE"
IN_IMAGE = Path("/sqshforge/triton-cache")


def begin(folder: Path, environment: Mapping[str, str], in_image: Path = IN_IMAGE) -> str:
    """Fill a job's folder with the kernels that are there; says what was done, or nothing.

    A job never fails for the want of a cache: what cannot be copied is compiled.
    """
    named = environment.get(SEED)
    seed = Path(named) if named else in_image
    if not seed.is_dir():
        return f"{SEED}={named} is not there: kernels are compiled anew" if named else ""
    try:
        done = _copy(seed, folder)
    except OSError as error:
        return f"{seed} cannot be copied ({error.strerror}): kernels are compiled anew"
    return f"{done} compiled kernels from {seed}" if done else ""


def keep(folder: Path, environment: Mapping[str, str]) -> str:
    """Add a job's kernels to the folder that is named for it; says what was done, or nothing."""
    place = environment.get(SAVE)
    if not place or not folder.is_dir():
        return ""
    try:
        done = _copy(folder, Path(place))
    except OSError as error:
        return f"{SAVE}={place}: kernels were not kept: {error.strerror}"
    return f"{done} compiled kernels kept in {place}"


def _copy(source: Path, place: Path) -> int:
    """Copy the keys that are not there yet, each whole or not at all; how many they were.

    Others may do the same: who comes second finds it done.
    """
    place.mkdir(parents=True, exist_ok=True)
    done = 0
    for key in sorted(source.iterdir()):
        if not key.is_dir() or (place / key.name).exists():
            continue
        staging = place / f".{os.urandom(8).hex()}"
        try:
            # What a killed process had only begun to write stays behind.
            shutil.copytree(key, staging, ignore=shutil.ignore_patterns(".*", "*tmp.*"))
            with contextlib.suppress(OSError):
                staging.rename(place / key.name)
                done += 1
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return done
