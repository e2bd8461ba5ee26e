"""The rehearsal of a target: its own Dockerfile, with made-up parts behind vendors' addresses.

The recipe, the template and the lock of Python packages are real. Mirrors redirect what is fetched
from vendors' hosts to made-up parts (tests/support/vendor_parts.py), and the copied lock has their
commits. Two packages of 2024 have their real files, except for the CUDA code that only their
repositories have; Triton has the file that our patch changes.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import yaml

from sqshforge import engine, lock, platforms, recipe
from sqshforge.build import base_image, inputs, wheels
from sqshforge.build.base_image import BaseImageProvider
from sqshforge.build.inputs import BuildEnvironment
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.lock import Lock
from sqshforge.lock.model import LockedIndex, LockedPackage
from sqshforge.network import access
from sqshforge.network.mirrors import Mirrors
from sqshforge.recipe import Recipe, normalize
from tests.support import vendor_bases, vendor_parts
from tests.support.web_servers import Index, Web, wheel

AMD64 = platforms.ALL["linux/amd64"]
TARGETS = ("cuda-mamba", "llama-fsdp", "cuda13-mamba", "neuron-mamba2", "neuron29-mamba2")
# Targets whose steps are byte for byte those of the rehearsed ones, or that are built for real.
OTHERS = ("composer-mamba", "cpu-mamba", "cuda-mamba-ubuntu", "smp-llama")

CUDA = "localhost/sqshforge-standin:cuda"
CUDA_COMPILER = "localhost/sqshforge-standin:cuda-devel"
BOOKWORM = "localhost/sqshforge-standin:bookworm"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables that NVIDIA's images set.
CUDA_ENV = {
    "PATH": f"/usr/local/nvidia/bin:/usr/local/cuda/bin:{PATH}",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib:/usr/local/nvidia/lib64",
}
CUDA_COMPILER_ENV = {"LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"}
IMAGES = {
    "nvidia/cuda:12.1.1-base-ubuntu22.04": CUDA,
    "nvidia/cuda:12.1.1-devel-ubuntu22.04": CUDA_COMPILER,
    "ubuntu:22.04": vendor_bases.IMAGE,
    "debian:bookworm-slim": BOOKWORM,
}
NEURON = "https://apt.repos.neuron.amazonaws.com"
# Packages of Neuron's own index that its other packages need, without naming a version.
NEEDS = {"torch-neuronx": ("libneuronxla",)}


def bases(root: Path, web: Web, folder: Path) -> None:
    """Make buildah images of the bases: Ubuntu and Debian from packages, with made-up CUDAs."""
    vendor_bases.base(root / "build" / "bases")
    _image(CUDA, vendor_bases.IMAGE, CUDA_ENV)
    toolkit = vendor_parts.written(folder / "cuda", vendor_parts.part("cuda", web.url))
    _image(CUDA_COMPILER, CUDA, CUDA_COMPILER_ENV, (toolkit, "/usr/local/cuda"))
    # CUDA 13's compiler is a Python package; this variable makes torch use another one.
    wrapper = vendor_parts.written(folder / "cuda13", vendor_parts.part("cuda13", web.url))
    tar = _bookworm(root)
    _image(BOOKWORM, "scratch", {"PATH": PATH}, (tar, "/"))
    _image(BOOKWORM, BOOKWORM, {"PYTORCH_NVCC": "/opt/standin/nvcc"}, (wrapper, "/opt/standin"))


def _bookworm(root: Path) -> Path:
    """Make the base of cuda13-mamba, as sqshforge does."""
    programs = Programs()
    provider = BaseImageProvider(
        engine=engine.choose("buildah", programs),
        cache=root / "build" / "bases",
        keys=root / "recipes" / "keys",
        mirrors=Mirrors(),
        programs=programs,
        reporter=Reporter(quiet=True),
    )
    what = recipe.find("cuda13-mamba", root / "recipes")
    bootstrap = what.base.bootstrap
    assert bootstrap is not None
    tar = provider.cache / "standin-bookworm.tar"
    archive = base_image.deb_lines(bootstrap, programs)
    base_image.make(bootstrap, what.platform, archive, tar, provider)
    return tar


def _image(name: str, start: str, env: dict[str, str], *copies: tuple[Path, str]) -> None:
    programs = Programs()
    container = programs.capture(["buildah", "from", start]).strip()
    try:
        for source, place in copies:
            programs.capture(["buildah", "add", "--quiet", container, source, place])
        for key, value in env.items():
            programs.capture(["buildah", "config", "--env", f"{key}={value}", container])
        programs.capture(["buildah", "commit", "--quiet", container, name])
    finally:
        programs.capture(["buildah", "rm", container])


def prepare(root: Path, target: str, folder: Path, web: Web) -> None:
    """Let a copy of the checkout build a target from made-up parts, which are put in a folder."""
    recipes = root / "recipes"
    _edit(recipes, web)
    what = recipe.find(target, recipes)
    before = lock.read(target, recipes)
    folder.mkdir()
    commits = _repositories(what, before, folder, web)
    _archives(what, folder, web)
    now = before.model_copy(
        update={
            "inputs": lock.inputs(what),
            "base": before.base.model_copy(update={"digest": None}),
            "compiler": before.compiler and before.compiler.model_copy(update={"digest": None}),
            "python": before.python.model_copy(update={"bound": _bound(before, web)}),
            "sources": tuple(
                one.model_copy(update={"commit": commits[one.name]}) for one in before.sources
            ),
            "archives": tuple(one.model_copy(update={"sha256": None}) for one in before.archives),
        }
    )
    lock.path_of(target, recipes).write_text(now.text())
    sources = {one.git: (folder / name).as_uri() for name, one in what.sources.items()}
    for archive in what.archives.values():
        sources |= {one: (folder / archive.file).as_uri() for one in archive.addresses}
    indexes = {one.url: f"{web.url}/simple" for one in what.python.indexes.values()}
    mirrors = {"images": IMAGES, "sources": sources, "indexes": indexes}
    (root / "mirrors.yaml").write_text(yaml.safe_dump(mirrors))


def _edit(recipes: Path, web: Web) -> None:
    """Edit what no mirror redirects: Neuron's archive of Debian packages; and require less disk."""
    for path in recipes.glob("*.yaml"):
        text = re.sub(r"^disk_gb: \S+", "disk_gb: 20.0", path.read_text(), flags=re.MULTILINE)
        path.write_text(text.replace(f"url: {NEURON}\n", f"url: {web.url}/neuron\n"))


def _archives(what: Recipe, folder: Path, web: Web) -> None:
    """Make what the recipe downloads."""
    for name, archive in what.archives.items():
        path = folder / archive.file
        if name == "efa":
            vendor_parts.efa(path)
        elif name == "llvm":
            vendor_parts.llvm(path)
        elif name in vendor_parts.CUDA_PROGRAMS:
            vendor_parts.cuda_program(path, name)
        else:
            (source,) = what.apt_sources.values()
            made = vendor_parts.apt_archive(source.suite, source.component, source.packages)
            path.write_bytes(made.pop("key"))
            web.files |= {f"/neuron/{place}": content for place, content in made.items()}


def _bound(locked: Lock, web: Web) -> tuple[LockedIndex, ...]:
    """Serve the packages of vendors' indexes from one of ours; returns them, with its hashes."""
    index = Index(web)
    found = []
    for one in locked.python.bound:
        needs = {package: NEEDS.get(package.name, ()) for package in one.packages}
        made = [
            (package, wheel(package.name, package.version, needs=needs[package]))
            for package in needs
        ]
        index.add(*(distribution for _, distribution in made))
        named = {package.name for package in one.packages}
        index.add(*(wheel(name) for names in needs.values() for name in names if name not in named))
        packages = tuple(d.locked() if package.hashes else package for package, d in made)
        found.append(one.model_copy(update={"packages": packages}))
    for path in [path for path in web.files if "+" in path]:
        web.files[path.replace("+", "%2B")] = web.files[path]  # pip asks for this path
    return tuple(found)


def _repositories(what: Recipe, locked: Lock, folder: Path, web: Web) -> dict[str, str]:
    """Make a git repository for each source, with its ref as a branch; returns their commits."""
    commits = {}
    for name, source in what.sources.items():
        built = next((one for one in what.python.built if one.source == name), None)
        if built is not None:
            files = _of_package(normalize(built.package), locked, folder)
        else:
            files = {**vendor_parts.part(name, web.url), "LICENSE": f"{source.license}\n"}
        if name == "triton":
            files["python/triton/__init__.py"] = ""
            files["python/triton/runtime/cache.py"] = _triton_cache(locked, folder)
        commits[name] = vendor_parts.repository(folder / name, files, source.ref)
    return commits


def _of_package(name: str, locked: Lock, folder: Path) -> dict[str, str]:
    """Return a source distribution's files, plus empty ones for the CUDA code that it lacks."""
    package = next(one for one in locked.python.built if one.name == name)
    files = {}
    with tarfile.open(_fetched(package, locked, folder)) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            if content is not None:
                files[member.name.partition("/")[2]] = content.read().decode()
    lacking = re.findall(r'"(csrc/[^"]+\.(?:cpp|cu))"', files["setup.py"])
    assert lacking
    assert not files.keys() & set(lacking)
    return {**files, **dict.fromkeys(lacking, "// made up\n")}


def _triton_cache(locked: Lock, folder: Path) -> str:
    """Return the file that our patch changes, from the official wheel."""
    package = next(one for one in locked.python.packages if one.name == "triton")
    with zipfile.ZipFile(_fetched(package, locked, folder)) as archive:
        return archive.read("triton/runtime/cache.py").decode()


def _fetched(package: LockedPackage, locked: Lock, folder: Path) -> Path:
    """Fetch a package's file, and check it against the lock's checksum."""
    programs = Programs()
    environment = BuildEnvironment(
        bundle=folder / "packages",
        pip=access.pip(programs),
        mirrors=Mirrors(),
        programs=programs,
        reporter=Reporter(quiet=True),
    )
    (file,) = wheels.files([package], locked.python.version, AMD64, environment.pip, programs)
    return inputs.taken(file, file.name, environment).path
