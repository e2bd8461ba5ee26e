"""The images that a build starts from: pulled where a registry answers, else made from packages."""

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
# Nobody reads manuals in a training image; what apt installs later keeps to this too.
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
KEPT = ("/usr/share/doc/*/copyright",)


@dataclass(frozen=True, kw_only=True)
class BaseImageProvider:
    """Where bases come from on this machine, and where those that are made are kept."""

    engine: Engine
    cache: Path
    keys: Path  # SUITE.asc: the keys that a bootstrap trusts
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
    """Make sure that the engine has base and compiler image: build arguments and their names there.

    `archive` is what `deb_lines` gives, to make the base from where no registry answers. Raises
    `MissingError` where none does and the recipe has no other way; `RequestError` and `WorkError`
    where AWS's registry says what is wrong.
    """
    base = _base(what, lock, provider, archive)
    if lock.compiler is None:
        return {"BASE": base, "COMPILER": base}
    return {"BASE": base, "COMPILER": _pulled("compiler image", what, lock.compiler, provider)}


def restored(bundle: Bundle, engine: Engine) -> dict[str, str]:
    """The same out of a bundle: its images are loaded where the engine does not have them."""
    for name in bundle.images.values():
        if engine.image(name) is None:
            engine.restore(next(o.path for o in bundle.supplies if o.file == file_of(name)))
    return dict(bundle.images)


def file_of(name: str) -> str:
    """The place of an image in a bundle."""
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
    """No address of an image gives it."""


def _pulled(kind: str, what: Recipe, image: LockedImage, provider: BaseImageProvider) -> str:
    """An image's name in the engine, from the first of its addresses or their mirrors that has it.

    What the engine has already is taken before any registry is asked. Raises `NowhereError` where
    none has it; where there is one address alone, what AWS's registry says is wrong.
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
    """The name that the engine has an image under already; None for none."""
    name = _name(mirrored, platform)
    # A mirror may be an image that the engine has, under a name that no registry knows; what that
    # names now is what counts.
    if mirrored != reference and engine.image(mirrored) is not None:
        engine.tag(mirrored, name)
        return name
    return name if engine.image(name) is not None else None


def _pull(address: str, platform: Platform, provider: BaseImageProvider) -> str:
    """Have the engine pull an image: the name that it has there then."""
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
    """The archive to bootstrap from: the recipe's, else this machine's own for the suite.

    An empty list leaves the choice to mmdebstrap, which knows each suite's public archive.
    """
    if bootstrap is None:
        return []
    if bootstrap.mirror is None:
        return apt_sources(bootstrap.suite, programs)
    mirror = bootstrap.mirror
    if bootstrap.snapshot is not None:
        # A snapshot's release files are past their date by design.
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
    """Bootstrap a system into a tar file, which is there whole or not at all; nothing if it is.

    mmdebstrap goes by SOURCE_DATE_EPOCH itself: times, and the days in /etc/shadow.
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
    if not platform.is_own:  # that it is emulated has been tried, as its own check does not
        argv += [f"--architectures={platform.architecture}", "--skip=check/qemu"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    argv += [f"--dpkgopt=path-include={pattern}" for pattern in KEPT]
    argv += ["--aptopt=Acquire::Languages none"]
    written = partial(tar)
    try:
        with (
            # apt reads keys as a user of its own.
            temporary.folder("bootstrap", _Clearing(program, programs), mode=0o755) as folder,
            provider.reporter.track("bootstrap") as tracker,
        ):
            keys = _trusted(provider.keys / f"{bootstrap.suite}.asc", folder / "keys")
            argv += [f"--keyring={keys}", "--format=tar", bootstrap.suite, written, *sources]
            # What is apart goes at once and with all that it has mounted; else mmdebstrap is given
            # the time to unmount.
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
    """Words that start a program whose processes and mounts are gone when it is killed.

    None for an ordinary user, for whom mmdebstrap has namespaces of its own, nor where root may
    make none.
    """
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if os.geteuid() != 0 or programs.which("unshare") is None:
        return []
    return words if programs.attempt([*words, "true"]).code == 0 else []


@dataclass(frozen=True)
class _Clearing:
    """Removes a folder that mmdebstrap worked in: of an ordinary user's it owns files as others."""

    program: Path
    programs: Programs

    def __call__(self, place: Path) -> None:
        temporary.clear(place)
        if place.exists() and os.geteuid() != 0:
            below = [str(one) for one in place.iterdir()]
            self.programs.attempt([self.program, "--unshare-helper", "rm", "-rf", *below])
            temporary.clear(place)


def _trusted(pinned: Path, folder: Path) -> Path:
    """A new folder of keys for apt: those of this machine, and the pinned ones if there are any."""
    folder.mkdir()
    folder.chmod(0o755)
    for key in (*sorted(TRUSTED.glob("*.gpg")), *sorted(TRUSTED.glob("*.asc")), pinned):
        if key.is_file():
            shutil.copyfile(key, folder / key.name)
            (folder / key.name).chmod(0o644)
    return folder


def _name(reference: str, platform: Platform) -> str:
    """The name that a pulled image has in the engine."""
    return f"{REPOSITORY}:{_short(reference)}{platform.suffix}"


def _short(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
