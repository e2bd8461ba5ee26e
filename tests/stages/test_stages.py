"""Every step of the images that need vendors' hosts, run with made-up parts in their place.

The target's own Dockerfile is built (tests/stages/rehearsal.py explains how), so a wrong option,
path or COPY fails the build here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge import recipe
from sqshforge.build.build import name_of
from tests.stages import rehearsal
from tests.support import checkouts, engines
from tests.support.web_servers import Web, serving

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

# What the image's own Python finds, in the image's own environment.
LOOK = """
import ctypes, importlib.util, json, os, re, shutil, sys
from pathlib import Path
from training.job.machine.software import look_at_software

wanted = json.loads(sys.argv[1])
for name in wanted["libraries"]:
    ctypes.CDLL(name)

def codes(place):
    text = Path(place).read_bytes().decode("latin1")
    return sorted(set(re.findall(r"code=((?:sm|compute)_[0-9a-f]+)", text)))

def has_any(place):
    return any(Path(place).iterdir())

modules = {name: importlib.util.find_spec(name).origin for name in wanted["modules"]}
places = {**modules, **{place: place for place in wanted["compiled"]}}
software = look_at_software(Path("/"), os.environ)
print(json.dumps({
    "codes": {name: codes(place) for name, place in places.items()},
    "files": [place for place in wanted["files"] if os.path.exists(place)],
    "programs": [name for name in wanted["programs"] if shutil.which(name)],
    "licenses": [name for name in wanted["licenses"] if has_any(f"/usr/share/doc/{name}")],
    "mapped": sorted(set(re.findall(r"/opt/nccl/\\S+", Path("/proc/self/maps").read_text()))),
    "installer": software.installer,
    "plugin": software.plugin,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The made-up parts that an image must contain."""

    installer: tuple[int, ...]
    plugin: tuple[int, ...] = ()
    libraries: tuple[str, ...] = ("libfabric.so.1",)  # found by the loader
    modules: tuple[str, ...] = ()  # Python modules, compiled for the recipe's architectures
    compiled: tuple[str, ...] = ()  # other libraries compiled for these
    files: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    mapped: tuple[str, ...] = ()  # libraries of NCCL's that every process maps


NCCL = "/opt/nccl/lib/libnccl.so.2.20.3"
TOPOLOGIES = "/opt/aws-ofi-nccl/share/aws-ofi-nccl/xml"
CUDA = Expected(
    installer=(1, 30, 0),
    plugin=(1, 9, 1),
    libraries=("libfabric.so.1", "libnccl-net.so"),
    compiled=(NCCL,),
    files=(f"{TOPOLOGIES}/p4d-24xl-topo.xml", f"{TOPOLOGIES}/p5.48xl-topo.xml"),
    mapped=(NCCL,),
)
KERNELS = ("causal_conv1d_cuda", "selective_scan_cuda")
EXPECTED: Mapping[str, Expected] = {
    "cuda-mamba": Expected(**{**vars(CUDA), "modules": KERNELS}),
    "llama-fsdp": CUDA,
    "cuda13-mamba": Expected(
        installer=(1, 48, 0),
        plugin=(1, 19, 0),
        libraries=("libcudart.so", "libfabric.so.1", "libgdrapi.so", "libnccl-net.so"),
        modules=KERNELS,
    ),
    "neuron-mamba2": Expected(
        installer=(1, 30, 0),
        programs=("aws-neuronx-collectives", "aws-neuronx-runtime-lib", "aws-neuronx-tools"),
    ),
    "neuron29-mamba2": Expected(
        installer=(1, 48, 0),
        plugin=(1, 19, 0),
        programs=("aws-neuronx-collectives", "aws-neuronx-runtime-lib", "aws-neuronx-tools"),
    ),
}


@dataclass(frozen=True)
class Made:
    """A rehearsed target: the checkout that it was built in, and the server of its parts."""

    target: str
    root: Path
    web: Web

    @property
    def image(self) -> str:
        return name_of(self.target, self.root)

    def says(self, *words: str) -> str:
        """Return what a program in the image writes."""
        return engines.printed(self.image, *words)


def needed_by(pin: str) -> tuple[str, ...]:
    return rehearsal.NEEDS.get(pin.partition("=")[0], ())


@pytest.fixture(scope="module", params=rehearsal.TARGETS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    """Each target in turn, built with buildah in its own storage."""
    target = str(request.param)
    folder = tmp_path_factory.mktemp("stages")
    root = checkouts.copy(folder / "checkout")
    (root / "build" / "vendor").unlink()  # made-up parts must not lie where real builds look
    for name in ("engine", "caches"):
        (folder / name).mkdir()
    with pytest.MonkeyPatch.context() as patch, serving() as web:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))))
        # buildah keeps cache mounts there, and made-up objects must not end up in a real build.
        patch.setenv("TMPDIR", str(folder / "caches"))
        rehearsal.prepare(root, target, folder / "upstream", web)
        with engines.storage(folder / "engine"):
            rehearsal.bases(root, web, folder)
            done = subprocess.run(
                [sys.executable, "-m", "sqshforge", "build", target],
                cwd=root,
                env={**os.environ, "ENGINE": "buildah"},
                capture_output=True,
                text=True,
                timeout=2400,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            yield Made(target, root, web)
    shutil.rmtree(folder)


def test_its_dockerfile_is_that_of_the_real_image(made: Made) -> None:
    built = (made.root / "build" / made.target / "context" / "Dockerfile").read_text()
    golden = checkouts.ROOT / "tests" / "golden" / f"{made.target}.Dockerfile"
    ours = built.replace(f"{made.web.url}/neuron", rehearsal.NEURON)
    assert ours == re.sub(r"@sha256:[0-9a-f]{64}$", "", golden.read_text(), flags=re.MULTILINE)


def test_nothing_that_compiles_reaches_a_network(made: Made) -> None:
    """The parts try to; if one succeeded, the build would have failed already."""
    assert not [path for path, _ in made.web.asked if path.startswith("/by-")]


def test_what_the_stages_made_is_where_the_image_uses_it(made: Made) -> None:
    expected = EXPECTED[made.target]
    what = recipe.find(made.target, made.root / "recipes")
    wanted = {**vars(expected), "licenses": sorted(what.sources)}
    found = json.loads(made.says("python", "-c", LOOK, json.dumps(wanted)).splitlines()[-1])
    compiled = (*expected.modules, *expected.compiled)
    asked = [f"sm_{one}" for one in what.cuda.architectures] if what.cuda else []
    if what.cuda and what.cuda.ptx:
        asked.append(f"compute_{what.cuda.architectures[-1]}")
    assert found == {
        "codes": dict.fromkeys(compiled, sorted(asked)),
        "files": list(expected.files),
        "programs": list(expected.programs),
        "licenses": wanted["licenses"],
        "mapped": list(expected.mapped),
        "installer": list(expected.installer),
        "plugin": list(expected.plugin),
    }


def test_the_bill_of_materials_names_what_was_compiled_and_installed(made: Made) -> None:
    document = json.loads(made.says("cat", "/sqshforge/meta/sbom.spdx.json"))
    packages = {one["name"]: one for one in document["packages"]}
    what = recipe.find(made.target, made.root / "recipes")
    for name, source in what.sources.items():
        assert packages[name]["licenseDeclared"] == source.license
        assert f"/usr/share/doc/{name}/LICENSE" in packages[name]["sourceInfo"]
    pins = [pin for one in what.apt_sources.values() for pin in one.packages]
    for index in what.python.indexes.values():
        pins += [pin.replace("==", "=") for pin in index.packages]
    for pin in pins:
        name, _, version = pin.partition("=")
        if version:  # otherwise it is there if another needs it
            assert packages[name]["versionInfo"] == version
    assert packages.keys() >= {name for pin in pins for name in needed_by(pin)}
