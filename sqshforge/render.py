"""Recipe and lock into a Dockerfile and the build context around it: pure, but for `write`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from sqshforge import __version__
from sqshforge.errors import RequestError
from sqshforge.lock import Lock
from sqshforge.recipe import Recipe

# Folders of the context carry this time (2020-01-01), and files one in the half year after it that
# follows from their content: an equal context is equal, and BuildKit, which looks at sizes and
# times alone, sees every edit.
TIME = 1_577_836_800
SPREAD = 1 << 24  # seconds
LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True)
class Context:
    """A build context: small files by their content, large ones by where they lie."""

    files: Mapping[str, bytes]
    wheels: tuple[Path, ...] = ()

    def digest(self) -> str:
        """Changes whenever what the image is built from changes.

        Wheels do not count: which of them get in is decided by the hashes in requirements.txt.
        """
        total = hashlib.sha256()
        for name in sorted(self.files):
            total.update(f"{name}\0{len(self.files[name])}\0".encode())
            total.update(self.files[name])
        return f"sha256:{total.hexdigest()}"


def dockerfile(recipe: Recipe, lock: Lock, images: Path) -> str:
    """The Dockerfile of a recipe; `RequestError` where its template is absent or broken."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(images),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["dockerfile_quote"] = dockerfile_quote
    name = f"{recipe.target}.Dockerfile.j2"
    try:
        text = environment.get_template(name).render(
            recipe=recipe,
            base=base_reference(lock),
            installer=lock.python.installer_wheel(),
            requirements_sha256=hashlib.sha256(lock.requirements().encode()).hexdigest(),
            version=__version__,
        )
    except jinja2.TemplateNotFound as error:
        raise RequestError(
            f"the template {error.name} does not exist",
            where=str(images),
            mend=f"docs/targets.md tells how a target comes to its images/{name}",
        ) from None
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise RequestError(
            f"the template cannot be rendered: {error}",
            where=f"{images / name}" + (f", line {line}" if line else ""),
        ) from None
    return text.strip() + "\n"


def base_reference(lock: Lock) -> str:
    """The base image as the Dockerfile names it: by digest where the lock has one."""
    return f"{lock.base.image}@{lock.base.digest}" if lock.base.digest else lock.base.image


def dockerfile_quote(value: str) -> str:
    """A value for ENV and LABEL: quoted, and nothing in it is expanded."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def context(recipe: Recipe, lock: Lock, root: Path, wheels: Iterable[Path] = ()) -> Context:
    """Everything that the build of a recipe reads, from a checkout at `root`."""
    files = {
        "Dockerfile": dockerfile(recipe, lock, root / "images").encode(),
        "requirements.txt": lock.requirements().encode(),
        "meta/recipe.yaml": (root / "recipes" / f"{recipe.target}.yaml").read_bytes(),
        "meta/lock.json": lock.text().encode(),
    }
    for name in recipe.launchers:
        path = root / "launch" / f"{name}.sbatch"
        if not path.is_file():
            known = sorted(other.stem for other in path.parent.glob("*.sbatch"))
            raise RequestError(
                f"the launcher {name} does not exist",
                where=f"recipes/{recipe.target}.yaml, launchers",
                mend=f"launchers are: {', '.join(known)}",
            )
        files[f"launch/{path.name}"] = path.read_bytes()
    files["meta/provenance.json"] = _provenance(recipe, lock, files)
    for path in sorted((root / "training").rglob("*")):
        if path.is_file() and not any(part in LEFT_OUT for part in path.parts):
            files[str(path.relative_to(root))] = path.read_bytes()
    return Context(files=files, wheels=tuple(wheels))


def _provenance(recipe: Recipe, lock: Lock, files: Mapping[str, bytes]) -> bytes:
    """Where the image comes from: digests of its inputs, and what the lock left open."""
    facts = {
        "builder": f"sqshforge {__version__}",
        "target": recipe.target,
        "inputs": {
            name: f"sha256:{hashlib.sha256(content).hexdigest()}"
            for name, content in sorted(files.items())
        },
        "unlocked": list(lock.unlocked),
    }
    return (json.dumps(facts, indent=2) + "\n").encode()


def write(context: Context, folder: Path) -> None:
    """Lay a context out in a folder; nothing else is left in it.

    Wheels are hard links where the file system allows it, copies elsewhere.
    """
    staging = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "wheels").mkdir(parents=True)
    for name, content in context.files.items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)
        time = TIME + int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % SPREAD
        os.utime(path, (time, time))
    for wheel in context.wheels:
        place = staging / "wheels" / wheel.name
        try:
            os.link(wheel, place)
        except OSError:
            shutil.copyfile(wheel, place)
    for path in sorted(staging.rglob("*"), reverse=True):
        if path.is_dir():
            path.chmod(0o755)
            os.utime(path, (TIME, TIME))
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
