"""Report what the nodes of a Slurm cluster lack: one small job, one table.

`node_probe` runs on every node and reports what is there; `facts` parses that; `node_findings` and
`cluster_findings` judge it, without any access to the system; `job` talks to Slurm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.doctor.cluster import cluster_findings, job, node_probe
from sqshforge.doctor.cluster.cluster_findings import Row, folded
from sqshforge.doctor.cluster.facts import Image, Node
from sqshforge.doctor.cluster.node_findings import Asked
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter, duration, show_lines
from sqshforge.project import Project

WIDEST = 24  # most characters of the column of nodes
SECONDS = 120.0


@dataclass(frozen=True)
class Request:
    """What to check; an image of None means the newest one in this checkout.

    `launcher` finds the launcher of an image, None if it is not known.
    """

    nodes: int | None = None
    partition: str = ""
    folders: tuple[Path, ...] = ()
    image: Path | None = None
    seconds: float = SECONDS
    launcher: Callable[[Path], Path | None] = lambda image: None


def main(project: Project, request: Request, programs: Programs, reporter: Reporter) -> int:
    """Print what the nodes lack; return 0, or `MissingError`'s exit code if it is needed.

    Raises `MissingError` and `RequestError` as `job.plan` does, and `WorkError` if a node does not
    answer, after the table of the others is printed.
    """
    plan = job.plan(request.nodes, request.partition, programs)
    image = request.image or _newest(project.build)
    image = image.absolute() if image is not None else None
    began = time.monotonic()
    with contextlib.ExitStack() as markers:
        folders = [one.absolute() for one in request.folders or (Path.cwd(),)]
        made = [markers.enter_context(_marker(folder)) for folder in folders]
        paths = [path for path, _ in made]
        answers = job.ask(plan, paths, image, request.seconds, programs, reporter)
    asked = Asked(
        folders=tuple(folders),
        digests=tuple(digest for _, digest in made),
        image=image,
        head=_head(image) if image is not None else None,
    )
    nodes = [answers.nodes[name] for name in sorted(answers.nodes)]
    found = cluster_findings.rows(nodes, asked, answers.clocks)
    found += _slurm(programs)
    missing = sum(row.finding.needed and not row.finding.ok for row in found)
    show_lines(*_header(plan, nodes, time.monotonic() - began), *_table(found, image))
    _require_all(plan, answers, nodes, request.seconds, programs)
    if missing:
        show_lines("", f"{missing} missing")
        return MissingError.exit_code
    if image is None:
        line = suggest.make(project.root, "sqsh", TARGET="cpu-mamba")
    else:
        launcher = request.launcher(image) or project.root / "launch/mamba_fsdp.sbatch"
        line = _first_job(image, launcher, len(nodes), plan.partition if plan.is_asked else "")
    show_lines("", "all there", f"next: {line}")
    return 0


def _first_job(image: Path, launcher: Path, nodes: int, partition: str = "") -> str:
    """Return the command of a first job, which proves that a cluster works."""
    there = [f"--partition={partition}"] if partition else []
    words = ["sbatch", f"--nodes={nodes}", *there, suggest.shown(launcher)]
    return f"TRIAL=1 IMAGE={shlex.quote(suggest.shown(image))} {shlex.join(words)}"


def _header(plan: job.Plan, nodes: Sequence[Node], seconds: float) -> Iterator[str]:
    where = f" of partition {plan.partition}" if plan.partition else ""
    seen = folded(node.node for node in nodes)
    yield f"looked at {seen}{where} in {duration(seconds)}"
    states: dict[str, list[str]] = {}
    for name, state in plan.others.items():
        states.setdefault(state, []).append(name)
    for state, names in states.items():
        yield f"not looked at, {state}: {folded(names)}"
    yield ""


def _table(found: Sequence[Row], image: Path | None) -> Iterator[str]:
    wide = [len(folded(row.nodes)) for row in found if row.nodes]
    width = min(max([5, *wide]), WIDEST)
    for row in found:
        yield from row.lines(width)
    if image is None:
        yield f"{'-':8}{'':{width}}  image: build/ has none; --image=FILE has the nodes read one"


def _require_all(
    plan: job.Plan,
    answers: job.Answers,
    nodes: Sequence[Node],
    seconds: float,
    programs: Programs,
) -> None:
    """Raise `WorkError`, naming the nodes that did not answer, if there are any."""
    if len(nodes) >= plan.count:
        return
    listed = next((node.nodes for node in nodes if node.nodes), "")
    expected = plan.names or job.hostnames(listed, programs)
    silent = [name for name in expected if name not in answers.nodes]
    said = "".join(f"\n    {line}" for line in answers.errors[-job.TAIL :])
    raise WorkError(
        f"{plan.count - len(nodes)} of {plan.count} nodes did not answer within {seconds:.0f} s: "
        f"{folded(silent) or 'unknown'}{said}",
        fix=f"`scontrol show node {folded(silent)}`, slurmd's log there; --timeout waits longer",
    )


@contextlib.contextmanager
def _marker(folder: Path) -> Iterator[tuple[Path, str]]:
    """Create a file in a folder while the block runs; provide its path and its content's digest.

    Raises `RequestError` if this user cannot write there.
    """
    content = secrets.token_hex(64).encode()
    try:
        descriptor, name = tempfile.mkstemp(prefix=".sqshforge-doctor-", dir=folder)
    except OSError as error:
        raise RequestError(
            f"cannot create a file in {folder}: {error.strerror}",
            fix="--folder=DIR, a shared one that you may write; by default the current one",
        ) from None
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:  # closing it lets other machines see it
            file.write(content)
        yield path, hashlib.sha256(content).hexdigest()
    finally:
        path.unlink(missing_ok=True)


def _newest(build: Path) -> Path | None:
    """Return the newest squash file in build/; None without one."""
    # is_file, as a link may be broken.
    found = [(path.stat().st_mtime, path) for path in build.glob("*.sqsh") if path.is_file()]
    return max(found)[1] if found else None


def _head(image: Path) -> Image | None:
    """Read the beginning of an image on this machine; None if it cannot be read."""
    digest, read = hashlib.sha256(), 0
    if not image.is_file():  # opening a pipe would wait for a writer
        return None
    try:
        with image.open("rb") as file:
            while read < node_probe.HEAD and (block := file.read(node_probe.BLOCK)):
                digest.update(block)
                read += len(block)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return Image(size=size, read=read, digest=digest.hexdigest())


def _slurm(programs: Programs) -> list[Row]:
    """Return findings on how Slurm is configured to end jobs."""
    config = cluster_findings.pairs(_said(programs, "scontrol", "show", "config"))
    partitions = _said(programs, "scontrol", "show", "partition", "--oneliner")
    qualities = ""
    if config.get("PreemptType") == "preempt/qos" and programs.which("sacctmgr") is not None:
        words = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,GraceTime")
        qualities = _said(programs, *words)
    return list(cluster_findings.slurm(config, cluster_findings.graced(partitions, qualities)))


def _said(programs: Programs, *words: str) -> str:
    return programs.attempt(words, timeout=job.QUESTION).out
