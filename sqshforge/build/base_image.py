"""Provide the images a build starts from: pulled from a registry, or else made from packages."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqshforge.build import ecr
from sqshforge.build.dockerfile import base_references
from sqshforge.build.inputs import BuildEnvironment, Bundle
from sqshforge.engine import Engine
from sqshforge.errors import MissingError, SqshforgeError
from sqshforge.host import temporary
from sqshforge.host.files import partial, remove_leftovers
from sqshforge.host.locks import exclusive
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock, LockedImage
from sqshforge.network.access import apt_sources
from sqshforge.network.mirrors import Mirrors, first_given
from sqshforge.platforms import Platform
from sqshforge.project import Project, source_date_epoch
from sqshforge.recipe import Bootstrap, Recipe

REPOSITORY = "localhost/sqshforge-base"
TRUSTED = Path("/etc/apt/trusted.gpg.d")  # the keys that this machine's apt trusts
# Nobody reads manuals in a training image. Packages that apt installs later leave them out too.
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
KEPT = ("/usr/share/doc/*/copyright",)


@dataclass(frozen=True, kw_only=True)
class BaseImageProvider:
    """Where base images come from on this machine, and where the ones made here are kept."""

    engine: Engine
    cache: Path
    keys: Path  # folder of SUITE.asc files: the keys that a bootstrap trusts
    mirrors: Mirrors
    programs: Programs
    reporter: Reporter

    @classmethod
    def of(
        cls, project: Project, engine: Engine, environment: BuildEnvironment
    ) -> BaseImageProvider:
        return cls(
            engine=engine,
            cache=project.build / "bases",
            keys=project.recipes / "keys",
            mirrors=environment.mirrors,
            programs=environment.programs,
            reporter=environment.reporter,
        )


def prepare(
    what: Recipe, lock: Lock, provider: BaseImageProvider, archive: Sequence[str]
) -> dict[str, str]:
    """Make sure that the engine has the base and compiler images; return their names there.

    The result maps build arguments to image names. `archive` is the result of `deb_lines`, which
    the base is made from if no registry answers. Raises `MissingError` if none answers and the
    recipe has no bootstrap, `RequestError` or `WorkError` if AWS's registry reports the cause.
    """
    base = _base(what, lock, provider, archive)
    if lock.compiler is None:
        return {"BASE": base, "COMPILER": base}
    return {"BASE": base, "COMPILER": _pulled("compiler image", what, lock.compiler, provider)}


def restored(bundle: Bundle, engine: Engine) -> dict[str, str]:
    """Do the same from a bundle, loading those of its images that the engine does not have."""
    for name in bundle.images.values():
        if engine.image(name) is None:
            engine.restore(next(o.path for o in bundle.supplies if o.file == file_of(name)))
    return dict(bundle.images)


def file_of(name: str) -> str:
    """Return an image's path in a bundle."""
    return f"base/{name.rpartition(':')[2]}.tar"


def _base(what: Recipe, lock: Lock, provider: BaseImageProvider, archive: Sequence[str]) -> str:
    engine, reporter = provider.engine, provider.reporter
    bootstrap = what.base.bootstrap
    made_at = source_date_epoch()
    bootstrapped = ""
    if bootstrap is not None:
        times = [] if made_at is None else [made_at]
        made_of = (
            bootstrap.model_dump(mode="json", exclude={"components", "pockets"}),
            list(archive),
            *times,
            *([what.platform.name] if what.platform.suffix else []),
        )
        bootstrapped = f"{REPOSITORY}:{_short(*made_of)}"
        mirrored = [provider.mirrors.image(one) for one in base_references(what, lock.base)]
        pulled_before = any(engine.image(_name(one, what.platform)) is not None for one in mirrored)
        if not pulled_before and engine.image(bootstrapped) is not None:
            return bootstrapped
    try:
        return _pulled("base image", what, lock.base, provider)
    except NowhereError:
        if bootstrap is None:
            raise
    reporter.say(f"base: no registry answered; making {bootstrap.suite} from its packages")
    tar = provider.cache / f"base-{bootstrapped.rpartition(':')[2]}.tar"
    if not tar.is_file():
        make(bootstrap, what.platform, archive, tar, provider)
    engine.load(tar, bootstrapped, what.platform, made_at)
    return bootstrapped


class NowhereError(MissingError):
    """An image is not available at any of its addresses."""


def _pulled(kind: str, what: Recipe, image: LockedImage, provider: BaseImageProvider) -> str:
    """Get an image from the first of its addresses that has it; return its name in the engine.

    Mirrors replace the addresses. An image that the engine already has is used before any registry
    is asked. Raises `NowhereError` if no address has it; with a single address, the error that
    AWS's registry reported instead, if any.
    """
    references = base_references(what, image)
    mirrored = [provider.mirrors.image(one) for one in references]
    for reference, address in zip(references, mirrored, strict=True):
        held = _held(reference, address, what.platform, provider.engine)
        if held is not None:
            return held
    name, failed = first_given(
        mirrored, lambda one: _pull(one, what.platform, provider), SqshforgeError
    )
    if name is not None:
        return name
    if len(failed) == 1 and not isinstance(failed[0], NowhereError):
        raise failed[0]
    raise _nowhere(kind, references, failed, what)


def _held(reference: str, mirrored: str, platform: Platform, engine: Engine) -> str | None:
    """Return the name of an image that the engine already has; None if it does not."""
    name = _name(mirrored, platform)
    # A mirror may name an image that only the engine has, and no registry. That name may point to
    # another image by now, so tag what it points to.
    if mirrored != reference and engine.image(mirrored) is not None:
        engine.tag(mirrored, name)
        return name
    return name if engine.image(name) is not None else None


def _pull(address: str, platform: Platform, provider: BaseImageProvider) -> str:
    """Have the engine pull an image; return its name there."""
    engine, name = provider.engine, _name(address, platform)
    repository = ecr.parse(address)
    if repository is not None:
        ecr.login(repository, engine.program, provider.programs)
    provider.reporter.say(f"base: asking the registry for {address}")
    said = engine.pull(address, name, platform)
    if said is None:
        return name
    meant = ecr.explain(repository, said) if repository is not None else None
    last = said.strip().rpartition("\n")[2]
    raise meant or NowhereError(last, where=address)


def _nowhere(
    kind: str, references: Sequence[str], failed: Sequence[SqshforgeError], what: Recipe
) -> NowhereError:
    if len(failed) == 1:
        lines = [failed[0].what]
    else:
        lines = [f"{error.where}: {error.what}" for error in failed]
    return NowhereError(
        f"no registry gives the {kind} {references[0]}"
        + (f" for {what.platform.name}" if what.platform.suffix else "")
        + (f", at any of its {len(references)} addresses" if len(references) > 1 else "")
        + ("" if what.base.bootstrap else ", and the recipe has no bootstrap")
        + (":" if any(lines) else "")
        + "".join(f"\n    {line}" for line in lines if line),
        where=f"recipes/{what.target}.yaml, base",
        fix="check the network, the proxy and the registry login of the engine, or name a mirror "
        "(docs/images/offline.md)",
    )


def deb_lines(bootstrap: Bootstrap | None, programs: Programs) -> list[str]:
    """Return apt lines for the archive to bootstrap from: the recipe's, else this machine's own.

    An empty list leaves the choice to mmdebstrap, which knows each suite's public archive.
    """
    if bootstrap is None:
        return []
    if bootstrap.mirror is None:
        return apt_sources(bootstrap.suite, programs)
    mirror = bootstrap.mirror
    if bootstrap.snapshot is not None:
        # The release files of a snapshot have expired by design.
        mirror = f"[check-valid-until=no] {mirror.replace('{snapshot}', bootstrap.snapshot)}"
    components = " ".join(bootstrap.components)
    return [f"deb {mirror} {one} {components}" for one in bootstrap.pockets or (bootstrap.suite,)]


def make(
    bootstrap: Bootstrap,
    platform: Platform,
    sources: Sequence[str],
    tar: Path,
    provider: BaseImageProvider,
) -> None:
    """Bootstrap a system into a tar file, atomically; do nothing if the file exists.

    mmdebstrap applies SOURCE_DATE_EPOCH itself, to file times and to the days in /etc/shadow.
    """
    tar.parent.mkdir(parents=True, exist_ok=True)
    lock = tar.with_name(f".{tar.name}.lock")
    with exclusive(lock, "waiting for another build that makes this base", provider.reporter):
        remove_leftovers(tar)
        if not tar.is_file():
            _bootstrap(bootstrap, platform, sources, tar, provider)


def _bootstrap(
    bootstrap: Bootstrap,
    platform: Platform,
    sources: Sequence[str],
    tar: Path,
    provider: BaseImageProvider,
) -> None:
    programs = provider.programs
    program = programs.require("mmdebstrap", "it makes the base image")
    apart = _apart(programs)
    argv: list[str | Path] = [*apart, program]
    argv += ["--variant=minbase", f"--include={','.join(('apt', *bootstrap.packages))}"]
    if not platform.is_own:  # emulation was tested beforehand, which mmdebstrap's check does not do
        argv += [f"--architectures={platform.architecture}", "--skip=check/qemu"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    argv += [f"--dpkgopt=path-include={pattern}" for pattern in KEPT]
    argv += ["--aptopt=Acquire::Languages none"]
    written = partial(tar)
    try:
        with (
            # apt reads the keys as an unprivileged user, hence mode 755.
            temporary.folder("bootstrap", _Clearing(program, programs), mode=0o755) as folder,
            provider.reporter.track("bootstrap") as tracker,
        ):
            keys = _trusted(provider.keys / f"{bootstrap.suite}.asc", folder / "keys")
            argv += [f"--keyring={keys}", "--format=tar", bootstrap.suite, written, *sources]
            # Killing unshare ends its processes and removes their mounts. Without it, SIGTERM gives
            # mmdebstrap the time to unmount.
            programs.follow(
                argv,
                tracker.note,
                env={"TMPDIR": str(folder)},
                end=signal.SIGKILL if apart else signal.SIGTERM,
            )
        written.rename(tar)
    finally:
        written.unlink(missing_ok=True)


def _apart(programs: Programs) -> list[str]:
    """Return a command prefix under which a killed program leaves no processes and no mounts.

    It is empty for an ordinary user, for whom mmdebstrap makes its own namespaces, and if root may
    not make any.
    """
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if os.geteuid() != 0 or programs.which("unshare") is None:
        return []
    return words if programs.attempt([*words, "true"]).code == 0 else []


@dataclass(frozen=True)
class _Clearing:
    """Remove mmdebstrap's folder, in which an ordinary user's files may belong to other ids."""

    program: Path
    programs: Programs

    def __call__(self, place: Path) -> None:
        temporary.clear(place)
        if place.exists() and os.geteuid() != 0:
            below = [str(one) for one in place.iterdir()]
            self.programs.attempt([self.program, "--unshare-helper", "rm", "-rf", *below])
            temporary.clear(place)


def _trusted(pinned: Path, folder: Path) -> Path:
    """Fill a new folder with keys for apt: this machine's, and the pinned ones if there are any."""
    folder.mkdir()
    folder.chmod(0o755)
    for key in (*sorted(TRUSTED.glob("*.gpg")), *sorted(TRUSTED.glob("*.asc")), pinned):
        if key.is_file():
            shutil.copyfile(key, folder / key.name)
            (folder / key.name).chmod(0o644)
    return folder


def _name(reference: str, platform: Platform) -> str:
    """Return the name under which the engine keeps a pulled image."""
    return f"{REPOSITORY}:{_short(reference)}{platform.suffix}"


def _short(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
