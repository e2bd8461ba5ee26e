"""Which processes a node's program considers its own, with and without the kernel's lists."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from training.job import children

pytestmark = pytest.mark.processes


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


@pytest.mark.parametrize("lists", [True, False])
def test_all_are_found_whoever_started_them(monkeypatch: pytest.MonkeyPatch, lists: bool) -> None:
    """Children of a live thread, of one that has ended, and one that has itself ended."""
    assert children.KERNEL_LISTS or not lists, "this kernel has no lists: they were not tried"
    monkeypatch.setattr(children, "KERNEL_LISTS", lists)
    before = set(children.own_children())
    started: list[subprocess.Popen[bytes]] = [_sleeper()]
    may_end, has_started = threading.Event(), threading.Event()

    def start() -> None:
        started.append(_sleeper())
        has_started.set()
        may_end.wait()

    short = threading.Thread(target=lambda: started.append(_sleeper()))
    long = threading.Thread(target=start)
    try:
        for thread in (short, long):
            thread.start()
        short.join()
        has_started.wait()
        started.append(subprocess.Popen(["true"]))
        while not children.has_ended(started[-1].pid):
            time.sleep(0.01)
        assert set(children.own_children()) - before == {one.pid for one in started}
    finally:
        may_end.set()
        long.join()
        for one in started:
            one.kill()
            one.wait()
    assert not set(children.own_children()) & {one.pid for one in started}


def test_a_process_that_has_ended_has_none() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert children._children(ended.pid) == []
