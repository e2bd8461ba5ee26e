"""Tools that make a file from an earlier one, for benchmarks.delta.

Each makes the file `after` from `before` in an empty folder, and returns the resources used.
"""

from __future__ import annotations

import filecmp
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs, failed

WINDOW = "--long=31"  # zstd finds matches up to 2 GiB apart


@dataclass(frozen=True)
class Sent:
    """Bytes sent, CPU seconds of both ends and of the receiver alone, and the peak of memory."""

    bytes: int
    cpu_seconds: float
    receiver_cpu_seconds: float | None  # None: cannot be separated
    memory_bytes: int


def by_rsync(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """Send as between two machines: between two local folders rsync would copy the whole file."""
    there = work / "there.sqsh"
    shutil.copyfile(before, there)
    argv: list[str | Path] = ["rsync", "--no-whole-file", "--ignore-times", "--stats", after, there]
    said, cpu, memory = used(argv)
    found = re.findall(r"Total bytes (?:sent|received): ([\d,.]+)", said)
    same(there, after)
    return Sent(sum(int(re.sub(r"\D", "", one)) for one in found), cpu, None, memory)


def by_casync(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """Send the chunks that the first file lacks; casync chunks it again to find the others."""
    had, store = work / "had", work / "store.castr"
    used(["casync", "make", f"--store={had}", work / "had.caibx", before])
    _, cpu, memory = used(["casync", "make", f"--store={store}", work / "index.caibx", after])
    here = {path.name for path in had.rglob("*.cacnk")}
    new = [path for path in store.rglob("*.cacnk") if path.name not in here]
    sent = (work / "index.caibx").stat().st_size + sum(path.stat().st_size for path in new)
    argv: list[str | Path] = ["casync", "extract", f"--store={store}", f"--seed={before}"]
    _, more, most = used([*argv, work / "index.caibx", work / "made.sqsh"])
    same(work / "made.sqsh", after)
    return Sent(sent, round(cpu + more, 1), more, max(memory, most))


def by_zstd(before: Path, after: Path, work: Path, programs: Programs) -> Sent:
    """Send a patch, made where both files are, and applied where only the first one is."""
    patch, made = work / "patch.zst", work / "made.sqsh"
    words: list[str | Path] = ["zstd", "-q", WINDOW, f"--patch-from={before}"]
    _, cpu, memory = used([*words, after, "-o", patch])
    _, more, most = used([*words, "-d", patch, "-o", made])
    same(made, after)
    return Sent(patch.stat().st_size, round(cpu + more, 1), more, max(memory, most))


SENDERS: Mapping[str, Callable[[Path, Path, Path, Programs], Sent]] = {
    "rsync": by_rsync,
    "casync": by_casync,
    "zstd": by_zstd,
}


def used(argv: list[str | Path]) -> tuple[str, float, int]:
    """Run a program; returns its output, and CPU seconds and peak bytes of it and its children."""
    words = [str(word) for word in argv]
    code = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:])\n"
    code += "u = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    code += "print(f'\\n{u.ru_utime + u.ru_stime:.1f} {u.ru_maxrss * 1024}')\n"
    code += "sys.exit(done.returncode)"
    done = Programs().attempt([sys.executable, "-c", code, *words])
    if done.code != 0:
        raise failed(words, done.code, (done.err or done.out).splitlines())
    said, _, last = done.out.rstrip().rpartition("\n")
    cpu, memory = last.split()
    return said, float(cpu), int(memory)


def same(made: Path, wanted: Path) -> None:
    """Raise `WorkError` if a tool has not made the expected file."""
    if not filecmp.cmp(made, wanted, shallow=False):
        raise WorkError("the tool made a file that is not the second one", where=str(made))
