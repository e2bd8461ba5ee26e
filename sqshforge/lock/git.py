"""Git repositories: the commit that a tag or branch points to, and its files as one tar."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from sqshforge.errors import MissingError, WorkError
from sqshforge.host.programs import Programs, Result
from sqshforge.lock.model import LockedSource
from sqshforge.network.mirrors import bare

TIMEOUT = 60.0  # seconds that a host may take to list its references
# Never ask for a password, and give up on a host that sends nothing for a minute.
QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_HTTP_LOW_SPEED_LIMIT": "1",
    "GIT_HTTP_LOW_SPEED_TIME": "60",
}
# No setting of this user or machine may change the archived files.
PLAIN = {"HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent"}
PLAIN |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_COUNT": "0"}
PLAIN |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


def commit_of(url: str, ref: str, programs: Programs, ca: Path | None = None) -> str | None:
    """Return the commit of a tag or branch: empty if there is none, None if the host is silent.

    `ca` is the file of the certificates that this machine trusts: git does not look for it in the
    places where other programs do.
    """
    seen = _references(url, ref, programs, _environment(url, programs, ca))
    return None if seen is None else seen.get("commit", "")


def references(url: str, programs: Programs, ca: Path | None = None) -> dict[str, str] | None:
    """Return the commits of all tags and branches of a repository, by "tags/v1", "heads/main".

    None if the host does not answer. `ca` is as in `commit_of`.
    """
    said = programs.attempt(
        ["git", "ls-remote", "--tags", "--heads", url],
        env=_environment(url, programs, ca),
        timeout=TIMEOUT,
    )
    if said.code != 0:
        return None
    found = re.findall(r"^(\w{40})\trefs/(\S+?)(?:\^{})?$", said.out, re.MULTILINE)
    # An annotated tag is listed twice: first with its own hash, then with its commit's, which wins.
    return {name: commit for commit, name in found}


def snapshot(
    source: LockedSource, url: str, folder: Path, programs: Programs, ca: Path | None = None
) -> tuple[Path, str]:
    """Write the files of a source at its commit as a tar in `folder`; return the tar and commit.

    The commit is the lock's; if that has none, the tag's or branch's current one. The tar of one
    commit is always the same. `ca` is as in `commit_of`.

    Raises `MissingError` if the host does not answer or lacks the tag or branch, and `WorkError`
    if the tag has moved away from the locked commit or the branch no longer contains it.
    """
    if source.commit:
        place = folder / f"{source.name}-{source.commit}.tar"
        if place.is_file():
            return place, source.commit
    programs.require("git", f"it fetches {source.name}")
    environment = _environment(url, programs, ca)
    seen = _references(url, source.ref, programs, environment)
    if not seen:
        raise MissingError(
            f"the source {source.name} cannot be fetched: its host does not know "
            f"{source.ref}, or does not answer",
            where=bare(url),
            fix="check the network and the proxy, or name a mirror (docs/images/offline.md)",
        )
    commit = source.commit or seen["commit"]
    if seen["kind"] == "tags" and seen["commit"] != commit:
        raise WorkError(
            f"the tag {source.ref} of {source.name} has moved:\n"
            f"    locked  {commit}\n    now at  {seen['commit']}",
            where=bare(url),
            fix="ask who moved it; if the change is intended, run sqshforge lock",
        )
    place = folder / f"{source.name}-{commit}.tar"
    if not place.is_file():
        _pack(url, source.ref, commit, place, programs, environment)
    return place, commit


def _environment(url: str, programs: Programs, ca: Path | None) -> Mapping[str, str]:
    """Return git's environment, with `ca` for https unless git's own settings name certificates."""
    if ca is None or os.environ.get("GIT_SSL_CAINFO") or not url.startswith("https:"):
        return QUIET
    own = programs.attempt(["git", "config", "--get-urlmatch", "http.sslCAInfo", url])
    return QUIET if own.code == 0 else {**QUIET, "GIT_SSL_CAINFO": str(ca)}


def _references(
    url: str, ref: str, programs: Programs, environment: Mapping[str, str]
) -> dict[str, str] | None:
    """Return the "kind" of a name, "tags" or "heads", and its "commit"; empty if it is neither.

    None if the host does not answer.
    """
    names = [f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}", f"refs/heads/{ref}"]
    said = programs.attempt(["git", "ls-remote", url, *names], env=environment, timeout=TIMEOUT)
    if said.code != 0:
        return None
    found = {name: commit for commit, name in re.findall(r"^(\w{40})\t(\S+)$", said.out, re.M)}
    for name in (names[1], names[0], names[2]):  # an annotated tag's commit before its own hash
        if name in found:
            return {"kind": name.split("/")[1], "commit": found[name]}
    return {}


def _pack(
    url: str,
    ref: str,
    commit: str,
    place: Path,
    programs: Programs,
    environment: Mapping[str, str],
) -> None:
    """Fetch one commit into a repository beside `place`, and write its files as a tar there."""
    repository = place.with_suffix(".git")
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(repository, ignore_errors=True)  # left by an interrupted fetch

    def git(*words: str | Path) -> Result:
        return programs.attempt(["git", "-C", repository, *words], env=environment)

    programs.capture(["git", "init", "--quiet", "--bare", repository], env=QUIET)
    # Not every host serves a commit by its hash; then fetch the history of the tag or branch.
    if git("fetch", "--quiet", "--depth", "1", url, commit).code != 0:
        fetched = git("fetch", "--quiet", url, ref)
        if fetched.code != 0:
            raise MissingError(
                f"git cannot fetch {ref}: {fetched.err.strip()}",
                where=bare(url),
                fix="check the network and the proxy, or name a mirror (docs/images/offline.md)",
            )
    if git("cat-file", "-e", f"{commit}^{{commit}}").code != 0:
        raise WorkError(
            f"the commit {commit} is no longer in the history of {ref}",
            where=bare(url),
            fix="the branch was rewritten: sqshforge lock records its current commit",
        )
    # git archive may write facts about the commit into files (export-subst). Cut off the history,
    # so that they do not depend on how much of it was fetched.
    (repository / "shallow").write_text(f"{commit}\n")
    partial = place.with_name(f"{place.name}.part")
    archive = ("archive", "--format=tar", "--output", partial, commit)
    programs.capture(["git", "-C", repository, *archive], env=PLAIN)
    partial.rename(place)
    shutil.rmtree(repository)
