"""Turn a recipe and its lock into a Dockerfile and the small files of its build context.

Nothing here runs programs, uses the network or writes files.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from sqshforge import __version__, recipe
from sqshforge.build.context import TIME, Context
from sqshforge.errors import RequestError
from sqshforge.lock import Lock, LockedImage, LockedPackage, requirements
from sqshforge.lock.model import LockedPatch
from sqshforge.recipe import Recipe, normalize
from sqshforge.run import zipapp

LEFT_OUT = ("__pycache__",)
PAYLOAD = "payload"  # the context's folder that one COPY brings to /sqshforge
PROVENANCE = f"{PAYLOAD}/meta/provenance.json"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A package to compile, as templates see it: its source, checksum and patches."""

    name: str
    folder: str  # of the context
    file: str
    strip: int  # leading folders in the archive
    sum: str
    argument: str  # the build argument that brings the sum, if the lock does not have it
    patches: tuple[LockedPatch, ...]
    cache: str


def dockerfile(what: Recipe, lock: Lock, images: Path) -> str:
    """Render a recipe's Dockerfile.

    Raises `RequestError` for a template that is missing or broken, or leaves out a part of the
    recipe.
    """
    name = f"{what.template or what.target}.Dockerfile.j2"
    digest, _, base_name = _split(base_reference(what, lock.base))
    try:
        template = _templates(images).get_template(name)
        text = template.render(
            recipe=what,
            lock=lock,
            template=name,
            base=base_reference(what, lock.base),
            base_name=base_name,
            base_digest=digest,
            compiler=base_reference(what, lock.compiler or lock.base),
            installer=lock.python.installer_wheel(),
            site=what.site,
            sums=_sums(what, lock, images),
            built=[_compiled(one.package, one.source, what, lock) for one in what.python.built],
            triton=_triton(what, lock),
            version=__version__,
            time=TIME,
        )
    except jinja2.TemplateNotFound as error:
        raise RequestError(
            f"the template {error.name} does not exist",
            where=str(images),
            fix=f"docs/images/targets.md says how a target gets its images/{name}",
        ) from None
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise RequestError(
            f"the template cannot be rendered: {error}",
            where=f"{images / name}" + (f", line {line}" if line else ""),
        ) from None
    left_out = _left_out(what, lock, text)
    if left_out:
        raise RequestError(
            f"the template does not use what the recipe has: {', '.join(left_out)}",
            where=f"recipes/{what.target}.yaml, with {images / name}",
            fix="remove it from the recipe, or use a template that brings it into the image: "
            "docs/images/targets.md",
        )
    return text.strip() + "\n"


def _left_out(what: Recipe, lock: Lock, text: str) -> list[str]:
    """Return the keys of a recipe whose files or Debian packages its Dockerfile does not name.

    Every template of ours installs `apt`; one of a user's own may do without.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    code = "\n".join(lines)
    debian = {f"apt_sources.{name}": one.packages for name, one in what.apt_sources.items()}
    debian["apt_build"] = what.apt_build
    files = {f"python.indexes.{name}": f"{name}.txt" for name in what.python.indexes}
    if what.python.builders:
        files["python.builders"] = "builders.txt"
    if what.triton is not None:
        files["triton"] = "triton.tar" if what.triton_from_source else "triton.txt"
    for built in what.python.built:
        name = normalize(built.package)
        files[f"python.built {name}"] = f"{built.source}.tar" if built.source else f"{name}.tar.gz"
    files |= {f"sources.{name}": f"{name}.tar" for name in what.sources if what.builds_with(name)}
    for name, archive in what.archives.items():
        if what.builds_with(name):
            files[f"archives.{name}"] = archive.file
    files |= {f"patches.{patch.of}": patch.file for patch in lock.patches}
    words = set(code.split())
    return [
        *(key for key, packages in debian.items() if not words.issuperset(packages)),
        *(key for key, file in files.items() if f"/{file}" not in code),
    ]


@functools.cache
def _templates(folder: Path) -> jinja2.Environment:
    """Return a folder's templates, each compiled once unless its file changes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["dockerfile_quote"] = dockerfile_quote
    return environment


def base_reference(what: Recipe, image: LockedImage) -> str:
    """Return an image as the Dockerfile names it: by digest if the lock has one."""
    return base_references(what, image)[0]


def base_references(what: Recipe, image: LockedImage) -> list[str]:
    """Return all references to an image, in the order in which they are tried."""
    return [f"{one}@{image.digest}" if image.digest else one for one in what.addresses(image.image)]


def dockerfile_quote(value: str) -> str:
    """Quote a value for ENV or LABEL so that nothing in it is expanded."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def argument(kind: str, name: str) -> str:
    """Name the build argument for a checksum, such as SOURCE_AWS_OFI_NCCL."""
    return f"{kind}_{name}".upper().replace("-", "_")


def context(what: Recipe, lock: Lock, root: Path, provenance: Mapping[str, Any]) -> Context:
    """Collect the small files that a recipe's build reads, from a checkout at `root`.

    `provenance` has facts about this one build, and does not count in the context's digest.
    """
    files = {
        "Dockerfile": dockerfile(what, lock, root / "images").encode(),
        "meta/recipe.yaml": _text(what, root).encode(),
        "meta/lock.json": lock.text().encode(),
        **{f"requirements/{k}": v.encode() for k, v in requirement_files(what, lock).items()},
        **{f"patches/{one.file}": _patch(root, one) for one in lock.patches},
        **_launchers(what, root),
        f"{PAYLOAD}/LICENSE": (root / "LICENSE").read_bytes(),
        f"{PAYLOAD}/launch/{zipapp.NAME}": zipapp.runtime(),
    }
    folders = {f"{PAYLOAD}/{name}": name for name in ("configs", "training")}
    folders |= {"inside": "images/inside", "triton-cache": f"warm/{what.name}"}
    for place, folder in folders.items():
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not any(part in LEFT_OUT for part in path.parts):
                files[f"{place}/{path.relative_to(root / folder)}"] = path.read_bytes()
    return Context(files=files, loose={PROVENANCE: _provenance(what, lock, files, provenance)})


def _text(what: Recipe, root: Path) -> str:
    """Return the recipe for inside the image: merged with what it extends, parameters filled in."""
    return recipe.whole(
        root / "recipes" / f"{what.target}.yaml", what.parameters, what.platform.name
    )


def requirement_files(what: Recipe, lock: Lock) -> dict[str, str]:
    """Return the requirements files of a build, by name.

    Triton has a file of its own if it gets our patches.
    """
    python = lock.python
    triton = [one for one in python.packages if what.triton and one.name == "triton"]
    others = [one for one in python.packages if one not in triton]
    files = {"packages.txt": requirements(others)}
    if python.builders:
        files["builders.txt"] = requirements(python.builders)
    if triton:
        files["triton.txt"] = requirements(triton)
    return files | {f"{index.name}.txt": requirements(index.packages) for index in python.bound}


def _sums(what: Recipe, lock: Lock, images: Path) -> dict[str, str]:
    """Return the checksums of the files that RUN instructions use, by file name."""
    sums = {name: _sum(text.encode()) for name, text in requirement_files(what, lock).items()}
    return sums | {path.name: _sum(path.read_bytes()) for path in (images / "inside").glob("*.py")}


def _compiled(package: str, source: str | None, what: Recipe, lock: Lock) -> Compiled:
    name = normalize(package)
    patches = tuple(one for one in lock.patches if one.of in (name, source))
    locked = next(one for one in lock.python.built if one.name == name)
    key: list[object] = [package, what.python.version, what.cuda and what.cuda.codes]
    key += [[one.sha256 for one in patches], _torch(lock.python.packages)]
    cache = f"{name}{what.platform.suffix}-{_sum(json.dumps(key).encode())[:12]}"
    if source:
        brought = argument("SOURCE", source)
        return Compiled(
            name=name,
            folder="sources",
            file=f"{source}.tar",
            strip=0,
            sum=f"${{{brought}}}",
            argument=brought,
            patches=patches,
            cache=cache,
        )
    return Compiled(
        name=name,
        folder="sdists",
        file=f"{name}.tar.gz",
        strip=1,
        sum=locked.hashes[0].removeprefix("sha256:"),
        argument="",
        patches=patches,
        cache=cache,
    )


def _triton(what: Recipe, lock: Lock) -> Mapping[str, Any] | None:
    if what.triton is None:
        return None
    patches = [one for one in lock.patches if one.of == "triton"]
    key = [what.triton.version, what.python.version, [one.sha256 for one in patches]]
    return {
        "origin": what.triton.origin,
        "version": what.triton.version,
        "patches": patches,
        "cache": f"{_sum(json.dumps(key).encode())[:12]}{what.platform.suffix}",
    }


def _torch(packages: tuple[LockedPackage, ...]) -> str:
    return next((one.version for one in packages if one.name == "torch"), "")


def _patch(root: Path, patch: LockedPatch) -> bytes:
    """Return a patch's content; raises `RequestError` if it is not the one in the lock."""
    path = root / "patches" / patch.file
    content = path.read_bytes() if path.is_file() else b""
    if _sum(content) != patch.sha256:
        raise RequestError(
            "the patch is not the one of the lock",
            where=str(path),
            fix="sqshforge lock TARGET, if the change is intended",
        )
    return content


def _launchers(what: Recipe, root: Path) -> dict[str, bytes]:
    files = {}
    for name in what.launchers:
        path = root / "launch" / f"{name}.sbatch"
        if not path.is_file():
            known = sorted(other.stem for other in path.parent.glob("*.sbatch"))
            raise RequestError(
                f"the launcher {name} does not exist",
                where=f"recipes/{what.target}.yaml, launchers",
                fix=f"launchers are: {', '.join(known)}",
            )
        files[f"{PAYLOAD}/launch/{path.name}"] = path.read_bytes()
    return files


def _provenance(
    what: Recipe, lock: Lock, files: Mapping[str, bytes], known: Mapping[str, Any]
) -> bytes:
    """Record an image's origin: this build, digests of its inputs, and what is not locked."""
    facts = {
        "builder": f"sqshforge {__version__}",
        "target": what.target,
        "platform": what.platform.name,
        **known,
        "inputs": {
            name.removeprefix(f"{PAYLOAD}/"): f"sha256:{_sum(content)}"
            for name, content in sorted(files.items())
        },
        "unlocked": list(lock.unlocked),
    }
    return (json.dumps(facts, indent=2) + "\n").encode()


def _split(reference: str) -> tuple[str, str, str]:
    """Split a reference into its digest, the separator, and its name."""
    name, separator, digest = reference.partition("@")
    return digest, separator, name


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
