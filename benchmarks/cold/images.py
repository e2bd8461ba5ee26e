"""Which image of a target is started, and the list of its hot files."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import hot
from benchmarks.options import ROOT
from sqshforge.build import build
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.hot import HotList
from tests.support import checkouts, engines, vendor_bases

# The second one on a stand-in for its vendor's base, as nobody can build it without that vendor.
TARGETS = ("cpu-mamba", "cuda-mamba")


def hot_list(target: str) -> HotList:
    """The list that a target is packed by."""
    return HotList.read(ROOT / "recipes" / "hot" / f"{target}.txt")


@contextlib.contextmanager
def image(target: str, programs: Programs, reporter: Reporter) -> Iterator[str]:
    """The address of a target's image, for the length of a block; `SqshforgeError` without one."""
    if target == TARGETS[0]:
        yield hot.packed_from()
        return
    with tempfile.TemporaryDirectory(prefix="sqshforge-standin-") as name:
        folder = Path(name)
        root = checkouts.copy(folder / "checkout")
        vendor_bases.prepare(root)
        (folder / "engine").mkdir()
        with engines.storage(folder / "engine"):
            vendor_bases.base(root / "build" / "bases")
            made = vendor_bases.name_of(target)
            with reporter.track(f"build {made}"):
                for words in (("lock", made), ("build", made)):
                    programs.capture(
                        [sys.executable, "-m", "sqshforge", *words],
                        cwd=root,
                        env={**os.environ, "ENGINE": "buildah"},
                    )
            yield f"buildah://{build.name_of(made, root)}"
