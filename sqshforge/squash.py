"""Write an image as a squash file: flat, with enroot's files, atomic, and only once.

Two ways lead to the same tree: a mounted folder is squashed in place, a tar stream goes through
a filter into the squash tool. Neither puts a root file system on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqshforge import enroot, tarfilter
from sqshforge.disk import require_space
from sqshforge.enroot import ImageConfig
from sqshforge.errors import RequestError
from sqshforge.machine import sha256
from sqshforge.programs import Programs, failed
from sqshforge.progress import Reporter, Tracker
from sqshforge.source import Folder, Source, Stream

FORMAT = 1  # part of every key: raised when equal inputs come to give other bytes
MEMORY = "768M"

# zstd level and block size; docs/performance.md has the figures behind the choice.
PROFILES = {"fast": (1, "128K"), "shared": (3, "1M"), "archive": (15, "1M")}

# mksquashfs prints progress as [====  ] 12/345  3%.
_PERCENT = re.compile(r"(\d+)/(\d+)\s+\d+%")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to pack. `jobs` and `force` change nothing of the bytes."""

    level: int
    block: str
    jobs: int
    force: bool = False

    @classmethod
    def of(cls, profile: str, *, jobs: int | None = None, force: bool = False) -> Options:
        """The options of a named profile; `RequestError` for a name that is none.

        By default all processors that this process may use are used, which in a Slurm job or a
        cgroup's set of processors are those of the job.
        """
        if profile not in PROFILES:
            raise RequestError(
                f"unknown profile {profile!r}", mend=f"profiles are: {', '.join(PROFILES)}"
            )
        level, block = PROFILES[profile]
        return cls(level=level, block=block, jobs=jobs or len(os.sched_getaffinity(0)), force=force)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A squash file and the key of what it was made from."""

    path: Path
    size: int
    key: str
    seconds: float
    up_to_date: bool


def pack(
    source: Source, output: Path, options: Options, programs: Programs, reporter: Reporter
) -> Packed:
    """Pack a source; a no-op where the output already is what would come out.

    The file appears under its name whole or not at all, mode 0644, with its key beside it in
    FILE.json. Raises `RequestError` for a source that is not there or an output that is not
    ours, `MissingError` for tools or disk space, `WorkError` where packing fails.
    """
    started = time.monotonic()
    program = programs.require("mksquashfs", "it writes the squash file")
    config = source.config()
    epoch = _epoch(config)
    key = content_key(config, options, epoch, _version(program, programs))
    output = output.absolute()
    if not output.parent.is_dir():
        raise RequestError("the output's folder does not exist", where=str(output.parent))
    with _one_at_a_time(output, reporter):
        _remove_leftovers(output)
        known = config.digest is not None and not options.force and _is(output, key)
        if not known:
            _may_replace(output, options)
            require_space(output.parent, max(config.size, 1 << 20), f"packing {output.name}")
            _write(source, config, output, options, epoch, key, programs, reporter)
    return Packed(
        path=output,
        size=output.stat().st_size,
        key=key,
        seconds=time.monotonic() - started,
        up_to_date=known,
    )


def content_key(config: ImageConfig, options: Options, epoch: int, tool: str) -> str:
    """A digest of all that the bytes of the file depend on."""
    facts = {
        "format": FORMAT,
        "config": {name: value for name, value in asdict(config).items() if name != "size"},
        "level": options.level,
        "block": options.block,
        "epoch": epoch,
        "tool": tool,
    }
    return f"sha256:{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}"


def _write(
    source: Source,
    config: ImageConfig,
    output: Path,
    options: Options,
    epoch: int,
    key: str,
    programs: Programs,
    reporter: Reporter,
) -> None:
    partial = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    files = enroot.files(config)
    # The variable, and not -mkfs-time or -all-time: mksquashfs refuses to have both.
    environment = {"SOURCE_DATE_EPOCH": str(epoch)}
    try:
        with (
            source.open() as content,
            reporter.track(f"pack {output.name}", total=config.size or None) as tracker,
        ):
            if isinstance(content, Folder):
                _squash_folder(content, files, partial, options, environment, programs, tracker)
            else:
                _squash_stream(content, files, partial, options, environment, programs, tracker)
        partial.chmod(0o644)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        _record(output, key, config, partial)
        partial.rename(output)
        _sync(output.parent)
    finally:
        partial.unlink(missing_ok=True)


def _arguments(options: Options) -> list[str]:
    words = ["-noappend", "-all-root", "-no-xattrs", "-exports", "-exit-on-error"]
    words += ["-comp", "zstd", "-Xcompression-level", str(options.level), "-b", options.block]
    return [*words, "-processors", str(options.jobs), "-mem", MEMORY, "-root-mode", "755"]


def _squash_folder(
    content: Folder,
    files: dict[str, bytes],
    partial: Path,
    options: Options,
    environment: dict[str, str],
    programs: Programs,
    tracker: Tracker,
) -> None:
    """Squash a folder in place: what enroot changes is done by mksquashfs as it reads."""
    epoch = environment["SOURCE_DATE_EPOCH"]
    with tempfile.TemporaryDirectory(prefix="sqshforge-pack-") as folder:
        pseudo = Path(folder) / "pseudo"
        lines = []
        for index, (name, data) in enumerate(sorted(files.items())):
            (Path(folder) / str(index)).write_bytes(data)
            lines.append(f'"{name}" F {epoch} 644 0 0 cat "{folder}/{index}"\n')
        if not (content.path / "etc").is_dir():
            lines.insert(0, f"etc D {epoch} 755 0 0\n")
        pseudo.write_text("".join(lines))
        argv: list[str | Path] = [
            "mksquashfs",
            content.path,
            partial,
            *_arguments(options),
            "-progress",
        ]
        argv += ["-action", "chmod(u+r)@type(f)", "-action", "chmod(u+rwx)@type(d)"]
        argv += ["-pf", pseudo, "-wildcards", "-e", *tarfilter.LEFT_OUT, *sorted(files)]

        def on_line(line: str) -> None:
            found = _PERCENT.search(line)
            if found and tracker.total:
                tracker.set(tracker.total * int(found[1]) / max(1, int(found[2])))

        programs.follow(argv, on_line, env=environment)


def _squash_stream(
    content: Stream,
    files: dict[str, bytes],
    partial: Path,
    options: Options,
    environment: dict[str, str],
    programs: Programs,
    tracker: Tracker,
) -> None:
    """Send a tar through the filter into mksquashfs."""
    argv: list[str | Path] = [
        "mksquashfs",
        "-",
        partial,
        "-tar",
        *_arguments(options),
        "-no-progress",
    ]
    with tempfile.TemporaryFile() as said:
        with programs.start(argv, stdin=-1, stdout=said, stderr=said, env=environment) as process:
            assert process.stdin is not None
            epoch = int(environment["SOURCE_DATE_EPOCH"])
            broken = False
            try:
                tarfilter.copy(content.tar, process.stdin, files, epoch, tracker.advance)
                process.stdin.close()
            except BrokenPipeError:
                broken = True  # mksquashfs has ended early; its own words say why
            code = process.wait()
        if code != 0 or broken:
            said.seek(0)
            raise failed(
                [str(word) for word in argv],
                code,
                said.read().decode(errors="replace").splitlines(),
            )


def _epoch(config: ImageConfig) -> int:
    """SOURCE_DATE_EPOCH, else the image's creation time: the newest time in the file."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        return config.created
    if not text.isdigit():
        raise RequestError(
            f"SOURCE_DATE_EPOCH is {text!r}", mend="seconds since 1970, or leave it unset"
        )
    return int(text)


def _version(program: Path, programs: Programs) -> str:
    return programs.attempt([program, "-version"]).out.partition("\n")[0]


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.name}.json")


def _record(output: Path, key: str, config: ImageConfig, written: Path) -> None:
    """Put the key beside the output, before the output: a record without its file is harmless."""
    facts = {
        "key": key,
        "source": config.reference,
        "image": config.digest,
        "size": written.stat().st_size,
        "sha256": sha256(written),
    }
    partial = written.with_name(f"{written.name}.json")
    partial.write_text(json.dumps(facts, indent=2) + "\n")
    partial.rename(_beside(output))


def read_record(output: Path) -> dict[str, Any] | None:
    """What is noted beside a squash file; None where there is nothing of ours."""
    try:
        facts = json.loads(_beside(output).read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and "key" in facts and "sha256" in facts else None


def _is(output: Path, key: str) -> bool:
    """Whether the output is the file of this key, untouched since it was written."""
    facts = read_record(output)
    return (
        facts is not None
        and facts["key"] == key
        and output.is_file()
        and output.stat().st_size == facts["size"]
        and sha256(output) == facts["sha256"]
    )


def _may_replace(output: Path, options: Options) -> None:
    if output.exists() and read_record(output) is None and not options.force:
        raise RequestError(
            "the output exists and was not made by sqshforge",
            where=str(output),
            mend="add --force to replace it, or name another output",
        )


@contextlib.contextmanager
def _one_at_a_time(output: Path, reporter: Reporter) -> Iterator[None]:
    """Hold an output; the packers that come meanwhile wait, and then find it done."""
    lock = output.with_name(f".{output.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say(f"waiting for another packer of {output}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(output: Path) -> None:
    """Remove what killed packers left; the lock is held, so no other packer is at work."""
    for path in output.parent.glob(f".{output.name}.*.tmp*"):
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
