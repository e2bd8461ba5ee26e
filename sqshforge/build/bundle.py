"""Gather a bundle: everything that a target's build needs from outside, in one folder.

Interrupted gathering resumes where it stopped, and every file is verified by its checksum.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import jinja2

from sqshforge.build import base_image, build, inputs, wheels
from sqshforge.build.context import Context
from sqshforge.build.inputs import BuildEnvironment, BuildInput, Bundle
from sqshforge.engine import Build, Engine
from sqshforge.host.files import sha256
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock
from sqshforge.network import access
from sqshforge.network.mirrors import read_mirrors
from sqshforge.project import Project
from sqshforge.recipe import Recipe


def gather(
    what: Recipe,
    locked: Lock,
    engine: Engine,
    project: Project,
    programs: Programs,
    reporter: Reporter,
) -> tuple[Path, Bundle]:
    """Fill a target's bundle, and return its folder and contents.

    Raises `MissingError` if something is not available, `WorkError` if a checksum is wrong.
    """
    folder = project.bundle(what.name)
    environment = BuildEnvironment(
        bundle=folder,
        pip=access.pip(programs),
        mirrors=read_mirrors(project.root),
        programs=programs,
        reporter=reporter,
    )
    with inputs.gathering(environment):
        supplies = [
            *inputs.fetched(what, locked, environment),
            build.installer(what, locked, environment),
        ]
        supplies += _wheels(what, locked, environment)
        archive = base_image.deb_lines(what.base.bootstrap, programs)
        provider = base_image.BaseImageProvider.of(project, engine, environment)
        images = base_image.prepare(what, locked, provider, archive)
        supplies += _images(images, engine, environment)
        supplies += _apt(what, images, supplies, engine, project, environment)
        bundle = Bundle(supplies=tuple(supplies), images=images)
        inputs.record(locked, bundle, folder)
    return folder, bundle


def _wheels(what: Recipe, locked: Lock, environment: BuildEnvironment) -> Iterator[BuildInput]:
    """Fetch every wheel of the lock, each from the index that the recipe binds it to, if any."""
    python = locked.python
    version, programs = python.version, environment.programs
    every = [*python.packages, *python.builders]
    found = wheels.files(every, version, what.platform, environment.pip, programs)
    for index in python.bound:
        alone = access.Pip(index=environment.mirrors.index(index.url), cert=environment.pip.cert)
        found += wheels.files(index.packages, version, what.platform, alone, programs)
    for number, file in enumerate(found, 1):
        environment.reporter.say(f"package {number} of {len(found)}: {file.name}")
        yield inputs.taken(file, f"wheels/{file.name}", environment)


def _images(
    images: Mapping[str, str], engine: Engine, environment: BuildEnvironment
) -> Iterator[BuildInput]:
    """Save the images that the build starts from; they are loaded, and not in the context."""
    for name in dict.fromkeys(images.values()):
        tar = environment.bundle / base_image.file_of(name)
        if not tar.is_file():
            environment.reporter.say(f"image {name}")
            tar.parent.mkdir(exist_ok=True)
            partial = tar.with_suffix(".part")
            partial.unlink(missing_ok=True)  # buildah does not write to an existing archive
            engine.save(name, partial)
            partial.rename(tar)
        yield BuildInput(place="", path=tar, sha256=sha256(tar))


def _apt(
    what: Recipe,
    images: Mapping[str, str],
    supplies: list[BuildInput],
    engine: Engine,
    project: Project,
    environment: BuildEnvironment,
) -> Iterator[BuildInput]:
    """Fetch the Debian packages of each stage, and the package lists that prove them."""
    stages = {
        "system": (what.apt, images["BASE"]),
        "compiler": (what.apt_build, images["COMPILER"]),
    }
    stages |= {name: (one.packages, images["BASE"]) for name, one in what.apt_sources.items()}
    for stage, (packages, image) in stages.items():
        if not packages:
            continue
        place = environment.bundle / "apt" / stage
        made_of = json.dumps([*packages, image])
        note = place.with_name(f"{stage}.json")
        if not (place.is_dir() and note.is_file() and note.read_text() == made_of):
            note.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            _download(what, stage, packages, image, supplies, engine, project, place, environment)
            note.write_text(made_of)
        for path in sorted(place.rglob("*")):
            if path.is_file():
                yield inputs.of(path, str(path.relative_to(environment.bundle)))


def _download(
    what: Recipe,
    stage: str,
    packages: tuple[str, ...],
    image: str,
    supplies: list[BuildInput],
    engine: Engine,
    project: Project,
    place: Path,
    environment: BuildEnvironment,
) -> None:
    """Have the image's own apt download a stage's packages, and copy them out."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(project.root / "images"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = templates.get_template("vendor.Dockerfile.j2").render(
        recipe=what,
        stage=stage,
        packages=packages,
        base=image,
        source=what.apt_sources.get(stage),
    )
    folder = project.build / what.name / "vendor"
    archives = {one.place: one.path for one in supplies if one.place.startswith("archives/")}
    sums = {k: v for k, v in inputs.arguments(supplies).items() if f"ARG {k}\n" in text}
    Context(files={"Dockerfile": text.encode()}, large=archives).write(folder)
    name = f"localhost/sqshforge-vendor:{what.name}-{stage}-{build.tag_of(project.root)}"
    secrets = project.build / what.name / "vendor-secrets"
    with (
        build.secrets_of(environment.pip, False, secrets, {}) as given,
        environment.reporter.track(f"Debian packages of {stage}") as tracker,
    ):
        request = Build(
            context=folder,
            name=name,
            platform=what.platform,
            args={"BASE": image, **sums, **access.proxies()},
            secrets=given,
        )
        engine.build(request, tracker.note)
    partial = place.with_name(f".{stage}.part")
    shutil.rmtree(partial, ignore_errors=True)
    for inside in ("lib/apt/lists", "cache/apt/archives"):
        (partial / inside).mkdir(parents=True)
        engine.copy_out(name, f"/var/{inside}", partial / inside)
    partial.rename(place)
