"""Triton's compiled kernels: a job's cache starts from existing ones, and may be kept.

A cold cache costs minutes at the first step of a large model. An image may carry a warm one
(`/sqshforge/triton-cache`), or TRITON_CACHE_SEED names a folder of the host. Keys are made of all
that determines a kernel (source, Triton's version, device), so a cache of other kernels is useless
but harmless.
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
    """Fill a job's cache with existing kernels; return a line that says so, or nothing.

    A job never fails for lack of a cache: what cannot be copied is compiled.
    """
    named = environment.get(SEED)
    seed = Path(named) if named else in_image
    if not seed.is_dir():
        return f"{SEED}={named} does not exist: kernels are compiled anew" if named else ""
    try:
        done = _copy(seed, folder)
    except OSError as error:
        return f"{seed} cannot be copied ({error.strerror}): kernels are compiled anew"
    return f"{done} compiled kernels from {seed}" if done else ""


def keep(folder: Path, environment: Mapping[str, str]) -> str:
    """Add a job's kernels to TRITON_CACHE_SAVE; return a line that says so, or nothing."""
    place = environment.get(SAVE)
    if not place or not folder.is_dir():
        return ""
    try:
        done = _copy(folder, Path(place))
    except OSError as error:
        return f"{SAVE}={place}: kernels were not kept: {error.strerror}"
    return f"{done} compiled kernels kept in {place}"


def _copy(source: Path, place: Path) -> int:
    """Copy the keys that `place` lacks, each whole or not at all; return how many.

    Others may copy at the same time: whoever comes second finds the key there.
    """
    place.mkdir(parents=True, exist_ok=True)
    done = 0
    for key in sorted(source.iterdir()):
        if not key.is_dir() or (place / key.name).exists():
            continue
        staging = place / f".{os.urandom(8).hex()}"
        try:
            # Leave behind what a killed process had only begun to write.
            shutil.copytree(key, staging, ignore=shutil.ignore_patterns(".*", "*tmp.*"))
            with contextlib.suppress(OSError):
                staging.rename(place / key.name)
                done += 1
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return done
