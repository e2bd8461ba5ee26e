"""Build a target's image from context and base with an engine, unless it is up to date."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqshforge import __version__, doctor
from sqshforge.build import base_image, dockerfile, inputs, wheels
from sqshforge.build.inputs import BuildEnvironment, BuildInput
from sqshforge.engine import Build, Engine, Image
from sqshforge.errors import SqshforgeError, WorkError
from sqshforge.host.files import sha256
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.resources import require_space
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock
from sqshforge.network import access
from sqshforge.network.mirrors import Mirrors, read_mirrors
from sqshforge.project import EPOCH_VARIABLE, Project, source_date_epoch
from sqshforge.recipe import Recipe

INPUTS = "io.sqshforge.inputs"  # a label: digest of everything that an image was built from
JOB = 4 << 30  # most memory, in bytes, to compile for one CUDA architecture


@dataclass(frozen=True, kw_only=True)
class Built:
    """A target's image in the engine that built it."""

    name: str
    image: Image
    source: str
    seconds: float
    up_to_date: bool


def name_of(name: str, root: Path) -> str:
    """Return the image name of a target, or of a `Recipe.name`, which is the same in every engine.

    All checkouts on a machine share its engines, so the tag identifies the checkout at `root`.
    """
    return f"localhost/sqshforge-{name}:{tag_of(root)}"


def tag_of(root: Path) -> str:
    """Return the tag that identifies a checkout's images: a digest of its path."""
    return hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:12]


def build(
    what: Recipe,
    locked: Lock,
    engine: Engine,
    root: Path,
    programs: Programs,
    reporter: Reporter,
) -> Built:
    """Build the image of a recipe and its lock with an engine, from the checkout at `root`.

    Raises `RequestError` for a lock or template that does not fit, `MissingError` if the disk is
    too small or something is missing, `WorkError` if the build fails.
    """
    started = time.monotonic()
    project = Project(root)
    project.require_writable()
    name = name_of(what.name, root)
    project.build.mkdir(exist_ok=True)
    busy = f"waiting for another build of {what.name}"
    with exclusive(project.build_lock(what.name), busy, reporter):
        made_at = source_date_epoch()
        context = dockerfile.context(what, locked, root, {})
        digest = context.digest()
        inputs_digest = digest if made_at is None else f"{digest} at {made_at}"
        image = engine.image(name)
        up_to_date = image is not None and image.labels.get(INPUTS) == inputs_digest
        if not up_to_date:
            with ThreadPoolExecutor() as side:
                machine = Machine.ask(what, project, programs, reporter, side)
                doctor.require_builder(
                    doctor.Host(project=project, programs=programs, engine=engine.name)
                )
                for warning in engine.check(context.files["Dockerfile"].decode(), what.platform):
                    reporter.say(warning)
                for entry in locked.unlocked:
                    reporter.say(f"warning: not locked: {entry}")
                storage = engine.storage()
                if storage is not None:
                    require_space(storage, int(what.disk_gb * 1e9), f"building {what.name}")
            _build(what, locked, engine, project, inputs_digest, machine, programs, reporter)
            image = engine.image(name)
    if image is None:
        raise WorkError(f"{engine.name} built {name}, but does not list it", where=engine.name)
    return Built(
        name=name,
        image=image,
        source=engine.source(name),
        seconds=time.monotonic() - started,
        up_to_date=up_to_date,
    )


@dataclass(frozen=True)
class Machine:
    """Facts about this machine that come from slow programs, which run in the background."""

    revision: Future[str]
    deb_lines: Future[list[str]]
    pip: Future[access.Pip]

    @classmethod
    def ask(
        cls,
        what: Recipe,
        project: Project,
        programs: Programs,
        reporter: Reporter,
        side: ThreadPoolExecutor,
    ) -> Machine:
        """Start the programs in `side`; the answers are ready when it has shut down."""
        return cls(
            side.submit(_revision, project.root, programs, reporter),
            side.submit(base_image.deb_lines, what.base.bootstrap, programs),
            side.submit(access.pip, programs),
        )


def _build(
    what: Recipe,
    locked: Lock,
    engine: Engine,
    project: Project,
    inputs_digest: str,
    machine: Machine,
    programs: Programs,
    reporter: Reporter,
) -> None:
    """Build an image that is missing or out of date."""
    offline = inputs.offline()
    revision, pip = machine.revision.result(), machine.pip.result()
    mirrors = read_mirrors(project.root)
    bundle = project.bundle(what.name)
    environment = BuildEnvironment(
        bundle=bundle, pip=pip, mirrors=mirrors, programs=programs, reporter=reporter
    )
    if offline:
        held = inputs.bundled(what, locked, bundle)
        started_from = base_image.restored(held, engine)
        supplies = list(held.supplies)
    else:
        with inputs.gathering(environment):
            supplies = [
                *inputs.fetched(what, locked, environment),
                installer(what, locked, environment),
            ]
        supplies += [
            BuildInput(place=f"wheels/{path.name}", path=path, sha256=total)
            for path, total in access.local_wheels(pip, locked.sums())
        ]
        provider = base_image.BaseImageProvider.of(project, engine, environment)
        started_from = base_image.prepare(what, locked, provider, machine.deb_lines.result())
    made_at = source_date_epoch()
    made = time.time() if made_at is None else made_at
    created = datetime.fromtimestamp(made, timezone.utc).strftime("%FT%TZ")
    known: dict[str, Any] = {
        "commit": revision,
        "engine": engine.name,
        "created": created,
        "base": started_from["BASE"],
        "sources": {one.place: one.commit for one in supplies if one.commit},
        "fetched": {one.place: f"sha256:{one.sha256}" for one in supplies if one.argument},
        "offline": offline,
    }
    context = dockerfile.context(what, locked, project.root, known)
    folder = project.build / what.name / "context"
    context.holding({one.place: one.path for one in supplies if one.place}).write(folder)
    place = project.secrets(what.name)
    with (
        secrets_of(pip, offline, place, _indexes(what, mirrors)) as secrets,
        reporter.track(f"build {what.name}") as tracker,
    ):
        request = Build(
            context=folder,
            name=name_of(what.name, project.root),
            platform=what.platform,
            epoch=made_at,
            args={
                **started_from,
                **inputs.arguments(supplies),
                **({} if offline else access.proxies()),
                **jobs(what, engine),
                **({} if made_at is None else {EPOCH_VARIABLE: str(made_at)}),
            },
            labels={
                INPUTS: inputs_digest,
                "org.opencontainers.image.revision": revision,
                "org.opencontainers.image.created": created,
            },
            secrets=secrets,
            network="none" if offline else "host",
            annotations=_annotations(what, locked, revision, created),
        )
        try:
            engine.build(request, tracker.note)
        except WorkError as error:
            raise explained(error, locked) from None


def jobs(what: Recipe, engine: Engine) -> dict[str, str]:
    """Return the limit on compile jobs: MAX_JOBS, else what processors and memory allow.

    nvcc compiles for up to four architectures at a time within one job. The result is empty if
    nothing is compiled.
    """
    if not what.python.built and not what.sources:
        return {}
    asked = os.environ.get("MAX_JOBS", "")
    if asked.isdigit() and int(asked):
        return {"MAX_JOBS": asked}
    threads = min(4, len(what.cuda.architectures)) if what.cuda else 1
    processors, memory = engine.resources()
    most = processors if memory is None else min(processors, memory // (JOB * threads))
    return {"MAX_JOBS": str(max(1, most))}


def _indexes(what: Recipe, mirrors: Mirrors) -> dict[str, bytes]:
    """Return the addresses of indexes that packages are bound to; they may contain passwords."""
    return {
        f"index-{name}": mirrors.index(index.url).encode()
        for name, index in what.python.indexes.items()
    }


def _annotations(what: Recipe, locked: Lock, revision: str, created: str) -> dict[str, str]:
    """Return the manifest's annotations, with the keys of the OCI image specification."""
    base_name = what.address(locked.base.image)
    said = {
        "title": f"sqshforge {what.target}",
        "description": what.title,
        "version": __version__,
        "revision": revision,
        "created": created,
        "base.name": base_name,
        "base.digest": locked.base.digest or "",  # the registry's, not the one buildah sees
    }
    return {f"org.opencontainers.image.{key}": value for key, value in said.items()}


def _revision(root: Path, programs: Programs, reporter: Reporter) -> str:
    """Return the checkout's commit, with `-modified` if files differ; `unknown` without git."""
    if programs.which("git") is None:
        return "unknown"
    commit = programs.attempt(["git", "-C", root, "rev-parse", "HEAD"])
    state = programs.attempt(["git", "-C", root, "status", "--porcelain"])
    if commit.code == 0 and state.code == 0:
        return commit.out.strip() + ("-modified" if state.out.strip() else "")
    if "dubious ownership" in commit.err + state.err:
        trust = shlex.join(["git", "config", "--global", "--add", "safe.directory", str(root)])
        reporter.say(
            f"warning: the image does not record its commit: {root} belongs to another user, and "
            "git does not read it"
        )
        reporter.say(f"  fix:   {trust}")
    return "unknown"


def explained(error: WorkError, locked: Lock) -> SqshforgeError:
    """Return a build's failure with a fix added, if its message reveals the cause."""
    absent = re.search(r"No matching distribution found for (\S+)", error.what)
    if absent is not None:
        fix = (
            f"pip on this machine does not find {absent[1]}: a CPU build of torch needs PyTorch's "
            "own index in PIP_EXTRA_INDEX_URL or a folder in PIP_FIND_LINKS "
            "(docs/start/machines.md)"
        )
        return WorkError(error.what, where=error.where, fix=fix)
    fix = _lacking_base(error.what, locked)
    if fix:
        return WorkError(error.what, where=error.where, fix=fix)
    return _refused_patch(error.what, locked) or error


def _lacking_base(said: str, locked: Lock) -> str:
    """Say what to change where the base has no such Debian package or Python; "" for others."""
    package = re.search(
        r"E: (?:Unable to locate package (?P<a>\S+)|Package '(?P<b>\S+)' has no installation)", said
    )
    python = re.search(r": (python3\.\d+): (?:command )?not found", said)
    place = f"recipes/{locked.target}.yaml"
    if package is not None:
        name = package["a"] or package["b"]
        return f"{place}: the base's archives have no {name}; correct its name, or take it out"
    if python is not None:
        return (
            f"{place}: the image has no {python[1]}; name the base's own in python.version, or a "
            f"base that has it (apt may bring {python[1]})"
        )
    return ""


def _refused_patch(said: str, locked: Lock) -> WorkError | None:
    """Explain hunks that `patch` rejected, naming the commit; None for other failures."""
    hunks = re.findall(r"Hunk #(\d+) FAILED at (\d+)", said)
    file = re.search(r"patching file (\S+)", said)
    patch = next((one for one in locked.patches if file and one.path.endswith(file[1])), None)
    if not hunks or file is None or patch is None:
        return None
    source = next((one for one in locked.sources if one.name == patch.of), None)
    at = f"commit {source.commit or source.ref}" if source else "the version of the lock"
    where = ", ".join(f"hunk {number} (line {line})" for number, line in hunks)
    return WorkError(
        f"the patch {patch.file} does not apply to {patch.of} at {at}:\n    {file[1]}: {where}",
        where=f"patches/{patch.file}",
        fix="rebase the patch onto that source, or pin the commit it was made for",
    )


def installer(what: Recipe, locked: Lock, environment: BuildEnvironment) -> BuildInput:
    """Fetch pip's own wheel, checked against the lock's hash, unless it is there already."""
    python = locked.python
    place = f"wheels/{python.installer_wheel()}"
    path = environment.bundle / place
    allowed = {one.removeprefix("sha256:") for one in python.installer.hashes}
    if path.is_file() and sha256(path) in allowed:
        return inputs.of(path, place)
    (file,) = wheels.files(
        [python.installer], python.version, what.platform, environment.pip, environment.programs
    )
    return inputs.taken(file, place, environment)


@contextlib.contextmanager
def secrets_of(
    pip: access.Pip, offline: bool, folder: Path, more: Mapping[str, bytes]
) -> Iterator[Mapping[str, Path]]:
    """Provide the machine's settings as files that a build sees and an image never keeps.

    They are in a private folder that is removed afterwards; if a build is killed, the next one
    removes them.
    """
    ca = access.ca_bundle(pip)
    contents = {
        "pip": b"[global]\nno-index = true\n" if offline else pip.remote().encode(),
        "apt": b'Acquire::https::CaInfo "/run/secrets/ca";\n' if ca else b"",
        "ca": ca.read_bytes() if ca else b"",
        **more,
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        yield {name: folder / name for name in contents}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
