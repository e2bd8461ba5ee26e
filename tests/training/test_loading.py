"""Objects loaded for good are not scanned by garbage collection; a Ctrl-C meanwhile is not lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SEARCHES = """
import gc
searched = []
gc.callbacks.append(lambda phase, found: searched.append(found["generation"]))
from training.imports import loading
del searched[:]
"""


def prints(root: Path, code: str) -> list[str]:
    words = [sys.executable, "-c", SEARCHES + code]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_torch_is_loaded_without_a_search_and_left_out_of_later_ones(root: Path) -> None:
    loads = "with loading():\n import torch\n"
    shown = "print(len(searched), gc.isenabled(), gc.get_freeze_count() > 100_000)"
    assert prints(root, loads + shown) == ["0", "True", "True"]


def test_what_cannot_be_loaded_leaves_the_searches_on(root: Path) -> None:
    fails = "try:\n with loading():\n  import no_such_module\nexcept ImportError: pass\n"
    assert prints(root, fails + "print(gc.isenabled(), gc.get_freeze_count())") == ["True", "0"]


def test_a_process_that_has_torch_keeps_its_own_ways(root: Path) -> None:
    again = "import torch\nwith loading():\n import torch.distributed.run\n"
    assert prints(root, again + "print(gc.isenabled(), gc.get_freeze_count())") == ["True", "0"]


@pytest.mark.parametrize(
    "caught", ["except KeyboardInterrupt: pass", "except BaseException: raise ImportError"]
)
def test_ctrl_c_while_a_module_catches_it(root: Path, caught: str) -> None:
    """Some of torch's modules do, when they try an import. Later interrupts work as usual."""
    tries = f"\n  try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n  {caught}"
    within = f"import os, signal, time\ntry:\n with loading():{tries}\n  print('went on')\n"
    after = "except KeyboardInterrupt: print('interrupted')\n"
    kept = "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, gc.isenabled())"
    shown = prints(root, within + after + kept)
    assert [word for word in shown if word not in ("went", "on")] == ["interrupted", "True", "True"]
