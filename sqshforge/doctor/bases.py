"""Check whether the base images of all recipes are in their registries."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from sqshforge.doctor.finding import Finding, Host
from sqshforge.errors import SqshforgeError

TAKES = ("pydantic", "yaml")  # needed to read recipes; a bare machine gets them later
TIMEOUT = 10.0  # seconds that a registry may take to answer
WHAT = "base images in their registries"


def findings(host: Host) -> Iterator[Finding]:
    """Yield a finding for each image that is gone or closed, and one for all without an answer.

    None of them is `needed`: each only concerns its own targets.
    """
    if not all(importlib.util.find_spec(name) for name in TAKES):
        return
    if host.programs.which("skopeo") is None:
        yield Finding(WHAT, False, "not asked without skopeo", host.install("skopeo"), needed=False)
        return
    try:
        yield from _asked(host)
    except SqshforgeError as error:  # of a recipe or of mirrors.yaml
        yield Finding(WHAT, False, error.what.partition("\n")[0], error.fix, needed=False)


def _asked(host: Host) -> Iterator[Finding]:
    from sqshforge import lock, recipe
    from sqshforge.lock import bases
    from sqshforge.network.mirrors import read_mirrors
    from sqshforge.network.registries import Registries

    folder = host.project.recipes
    recipes = [recipe.find(name, folder) for name in recipe.targets(folder)]
    images = bases.wanted((one, lock.earlier(one.target, folder)) for one in recipes)
    mirrors = read_mirrors(host.project.root)
    remarks = bases.look(images, mirrors, Registries(), host.programs, TIMEOUT)
    if not remarks:
        yield Finding(WHAT, True, f"all {len(images)} answer")
    for one in remarks:
        yield Finding(f"base image {one.image}", False, one.what, one.fix, needed=False)
