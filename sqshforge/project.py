"""The paths in a checkout of this project, and SOURCE_DATE_EPOCH, the time of what it makes."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqshforge.errors import MissingError, RequestError

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
NEWEST_EPOCH = 2**32 - 1  # times in a squash file are unsigned 32-bit numbers


@dataclass(frozen=True)
class Project:
    """A checkout: recipes and templates to build from, and the folder for results."""

    root: Path

    @property
    def recipes(self) -> Path:
        return self.root / "recipes"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    def bundle(self, target: str) -> Path:
        """The bundle of a target: everything its build needs from outside."""
        return self.build / "vendor" / target

    def secrets(self, target: str) -> Path:
        """The folder of secrets, which a build sees and its image never keeps, while it runs."""
        return self.build / target / "secrets"

    def build_lock(self, target: str) -> Path:
        """The file that a target's build locks while it runs."""
        return self.build / f".{target}.lock"

    def sqsh(self, target: str) -> Path:
        return self.build / f"{target}.sqsh"

    def hot_list(self, target: str) -> Path:
        """The list of files that a start of a target reads; not every target has one."""
        return self.recipes / "hot" / f"{target}.txt"

    def require_writable(self) -> None:
        """Raise `MissingError` if another user's files in build/ are in the way.

        They may come from a run as root in the checkout of an ordinary user.
        """
        folder = self.build if self.build.exists() else self.root
        closed = in_the_way(folder, deep=folder == self.build)
        if closed is not None:
            raise not_ours(closed, folder)

    def denied(self, error: OSError) -> MissingError | None:
        """Explain a denied access to the checkout if another user's files cause it; else None."""
        if not isinstance(error, PermissionError) or error.filename is None:
            return None
        path = Path(os.fsdecode(error.filename)).absolute()
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_relative_to(self.root) or path.lstat().st_uid == os.geteuid():
            return None
        return not_ours(path, self.root)


def in_the_way(folder: Path, *, deep: bool = True) -> Path | None:
    """Return the first folder or lock that another user owns and this one cannot write to.

    Only `folder` itself is checked unless `deep`. None if there is no such path.
    """
    for path in (folder, *(_below(folder) if deep else ())):
        try:
            is_foreign = path.lstat().st_uid != os.geteuid()
        except OSError:  # it is gone, or never existed
            continue
        if is_foreign and not os.access(path, os.W_OK):
            return path
    return None


def not_ours(path: Path, folder: Path) -> MissingError:
    """Return the error for a path that another user owns; its fix changes the owner of `folder`."""
    user = user_name()
    return MissingError(
        f"{path} belongs to {owner(path)}, and {user} cannot write there",
        fix=f"sudo chown -R {user} {shlex.quote(str(folder))}  (or use a checkout of your own)",
    )


def user_name() -> str:
    """Return this user's name, or its id if it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):  # a user that this machine does not know
        return f"uid {path.lstat().st_uid}"


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name) for name in folders)
        yield from (Path(place, name) for name in files if name.endswith(".lock"))


def find() -> Project:
    """Return the checkout that this package runs from; `MissingError` if it is not in one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "recipes").is_dir() or not (root / "images").is_dir():
        raise MissingError(
            "recipes/ and images/ are not beside the sqshforge package",
            where=str(root),
            fix="run sqshforge from a checkout of the project (pip install -e .)",
        )
    return Project(root)


def cache_home() -> Path:
    """Return the cache folder: SQSHFORGE_CACHE, else `sqshforge` in XDG_CACHE_HOME or ~/.cache.

    Raises `MissingError` if neither is set and this user has no home.
    """
    own, above = os.environ.get("SQSHFORGE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return Path(above or Path.home() / ".cache") / "sqshforge"
    except RuntimeError:  # a user that this machine does not know, as in a container
        raise MissingError(
            "HOME is not set", fix="export HOME=DIR, or SQSHFORGE_CACHE=DIR"
        ) from None


def source_date_epoch() -> int | None:
    """Return SOURCE_DATE_EPOCH in seconds; None if it is not set, `RequestError` if it is invalid.

    https://reproducible-builds.org/specs/source-date-epoch/
    """
    text = os.environ.get(EPOCH_VARIABLE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= NEWEST_EPOCH):
        raise RequestError(
            f"{EPOCH_VARIABLE} is {text!r}", fix="seconds since 1970, or leave it unset"
        )
    return int(text)
