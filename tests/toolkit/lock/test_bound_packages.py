"""Packages bound to one index: another index's packages of the same names are never taken."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sqshforge import lock, recipe
from sqshforge.build import dockerfile
from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock
from sqshforge.network.access import Pip
from sqshforge.network.mirrors import Mirrors
from tests.support.web_servers import Distribution, Index, asking, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture

pytestmark = pytest.mark.processes

ADDRESS = "https://neuron.example.test/simple"
NEURON = {
    "neuronx-cc": "2.16",
    "neuronx-distributed": "0.10",
    "torch-neuronx": "2.5",
}
NEEDED = {"libneuronxla": "1.0", "nki": "0.1"}  # dependencies of those, without versions
BOUND = {**NEURON, **NEEDED}
INDEXES = {
    "neuron": {"url": ADDRESS, "packages": [*(f"{n}=={v}" for n, v in NEURON.items()), *NEEDED]}
}

NewIndex = Callable[..., Index]


def real(without: Iterable[str] = ()) -> list[Distribution]:
    """Return what Neuron's own index has, except for `without`."""
    needs = {"torch-neuronx": ["torch-xla", "libneuronxla"], "neuronx-distributed": ["nki>=0.1"]}
    return [
        wheel(name, version, needs=needs.get(name, ()), says="real")
        for name, version in BOUND.items()
        if name not in without
    ]


def placeholders() -> list[Distribution]:
    """Return what the public index has under those names: the same versions, and higher ones."""
    versions = [(name, one) for name, version in BOUND.items() for one in (version, "99.0")]
    return [wheel(name, version, says="placeholder") for name, version in versions]


@pytest.fixture
def public(new_index: NewIndex) -> Index:
    """An index with ordinary packages, and with placeholders."""
    ordinary = wheel("numpy", "1.26"), wheel("torch-xla", "2.5"), wheel("pip", "25.3")
    return new_index(*ordinary, *placeholders(), wheel("plain"), wheel("greedy", needs=["nki"]))


def resolved(
    folder: Path,
    public: Index,
    vendor: str,
    *more: str,
    pip: Pip | None = None,
    before: Lock | None = None,
) -> Lock:
    """Return the lock of a recipe with Neuron's packages, whose index has that address here."""
    what = small_recipe(folder, ["numpy==1.26", *more], INDEXES)
    mirrors = Mirrors(indexes={ADDRESS: vendor})
    return lock.resolve(what, asking(folder, pip or public.pip, mirrors, before))


def hashes(distributions: Iterable[Distribution]) -> dict[str, tuple[str, ...]]:
    return {one.project: one.locked().hashes for one in distributions}


def test_bound_packages_come_from_their_index_and_all_others_from_the_public_one(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    python = resolved(tmp_path, public, vendor.url).python
    assert {one.name: one.hashes for one in python.bound[0].packages} == hashes(real())
    assert [one.name for one in python.packages] == ["numpy", "torch-xla"]
    assert python.bound[0].url == ADDRESS
    assert not public.asked & set(BOUND)


@pytest.mark.parametrize("code", [None, 401, 403, 500, 503])
def test_what_an_index_that_does_not_answer_gives_is_open_and_asked_of_no_other(
    code: int | None, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    if code:
        vendor.web.code = code
    else:
        vendor.web.stop()
    locked = resolved(tmp_path, public, vendor.url)
    bound = locked.python.bound[0].packages
    assert {one.name: (one.version, one.hashes) for one in bound} == {
        name: (version, ()) for name, version in NEURON.items()
    }
    assert [one for one in locked.unlocked if "neuron" in one] == [
        f"{name}=={version}: the index neuron ({ADDRESS}) did not answer"
        for name, version in NEURON.items()
    ]
    assert [one.name for one in locked.python.packages] == ["numpy"]
    assert not public.asked & set(BOUND)


def test_an_index_that_is_silent_later_costs_no_sum_of_the_lock(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    before = resolved(tmp_path, public, vendor.url)
    vendor.web.stop()
    after = resolved(tmp_path, public, vendor.url, before=before)
    assert lock.changes(before, after) == []
    other = resolved(tmp_path, public, vendor.url, "plain==1.0", before=before)
    assert not any(one.hashes for one in other.python.bound[0].packages)


def test_an_index_that_answers_later_brings_its_sums(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    before = resolved(tmp_path, public, "http://127.0.0.1:1/simple")
    after = resolved(tmp_path, public, new_index(*real()).url, before=before)
    assert {one.name: one.hashes for one in after.python.bound[0].packages} == hashes(real())
    assert "neuronx-cc: 2.16 with other files" in lock.changes(before, after)


def test_a_bound_version_of_the_earlier_lock_stays_though_a_newer_one_is_there(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    before = resolved(tmp_path, public, vendor.url)
    vendor.add(wheel("libneuronxla", "1.1"))
    assert lock.changes(before, resolved(tmp_path, public, vendor.url, before=before)) == []


def test_a_public_package_that_needs_a_bound_one_never_brings_a_placeholder(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index()
    vendor.web.stop()
    with pytest.raises(WorkError, match="nki would come from an index other than"):
        resolved(tmp_path, public, vendor.url, "greedy==1.0")


@pytest.mark.parametrize("name", ["libneuronxla", "neuronx-cc"])
def test_a_bound_package_that_its_index_lacks_is_reported_by_name(
    name: str, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real(without=[name]))
    with pytest.raises(WorkError, match=f"{name} would come from an index other than"):
        resolved(tmp_path, public, vendor.url)


def test_a_bound_version_that_its_index_lacks_is_reported_although_another_index_has_it(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real(without=["neuronx-cc"]), wheel("neuronx-cc", "2.15"))
    with pytest.raises(WorkError, match=r"no version of neuronx-cc==2\.16") as caught:
        resolved(tmp_path, public, vendor.url)
    assert "recipes/small.yaml" in caught.value.where
    assert vendor.url in caught.value.fix
    assert "docs/images/offline.md" in caught.value.fix


@pytest.mark.parametrize("version", ["0.1", "99.0"])
def test_a_folder_of_wheels_brings_no_placeholder_either(
    version: str, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    (tmp_path / "wheels").mkdir()
    placeholder = wheel("nki", version, tag="cp310-cp310-manylinux_2_17_x86_64")
    (tmp_path / "wheels" / placeholder.name).write_bytes(placeholder.data)
    pip = Pip(index=public.url, find_links=(str(tmp_path / "wheels"),))
    with pytest.raises(WorkError, match="nki would come from an index other than"):
        resolved(tmp_path, public, vendor.url, pip=pip)


@pytest.mark.parametrize("answers", [True, False])
def test_a_mirror_that_takes_a_password_is_as_good_and_stays_out_of_the_lock(
    answers: bool, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    if not answers:
        vendor.web.stop()
    locked = resolved(tmp_path, public, vendor.url.replace("//", "//user:secret@") + "/")
    assert {one.name for one in locked.python.bound[0].packages} == set(
        BOUND if answers else NEURON
    )
    assert "secret" not in locked.text()
    assert vendor.url not in locked.text()


TORCH = {
    "url": "https://torch.example.test/cpu",
    "packages": ["torch==2.5+cpu"],
    "named_only": True,
}


def torchs() -> list[Distribution]:
    """Return what PyTorch's own index has: a build of torch, and an older numpy."""
    return [wheel("torch", "2.5+cpu", needs=["numpy>=1"]), wheel("numpy", "1.0", says="theirs")]


def bound_torch(folder: Path, public: Index, vendor: str, torch: str) -> Lock:
    """Return the lock of a recipe with Neuron's packages and a torch that only one index has."""
    what = small_recipe(folder, ["numpy==1.26"], {"pytorch": TORCH, **INDEXES})
    mirrors = Mirrors(indexes={ADDRESS: vendor, str(TORCH["url"]): torch})
    return lock.resolve(what, asking(folder, public.pip, mirrors))


def test_an_index_for_some_names_only_gives_no_others(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    """The others must not provide them either: the public one has that torch, and a newer one."""
    public.add(wheel("torch", "2.5"), wheel("torch", "2.6"))
    needing = wheel(
        "torch-neuronx", NEURON["torch-neuronx"], needs=["torch==2.5.*", "libneuronxla"]
    )
    vendor = new_index(*real(without=["torch-neuronx"]), needing)
    torch = new_index(*torchs())
    python = bound_torch(tmp_path, public, vendor.url, torch.url).python
    found = {index.name: {one.name for one in index.packages} for index in python.bound}
    assert found == {"pytorch": {"torch"}, "neuron": {*NEURON, *NEEDED}}
    assert python.bound[1].packages == (torchs()[0].locked(),)
    assert [f"{one.name} {one.version}" for one in python.packages] == ["numpy 1.26"]
    assert torch.asked == {"torch"}
    assert "torch" not in public.asked


def test_where_it_does_not_answer_the_pins_of_all_indexes_are_open(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    public.add(wheel("torch", "2.5"))
    torch = new_index(*torchs())
    torch.web.stop()
    found = bound_torch(tmp_path, public, new_index(*real()).url, torch.url)
    assert [one for one in found.unlocked if "the index" in one] == [
        f"{name}=={version}: the index pytorch ({TORCH['url']}) did not answer"
        for name, version in {**NEURON, "torch": "2.5+cpu"}.items()
    ]
    assert [one.name for one in found.python.packages] == ["numpy"]
    assert [one.hashes for index in found.python.bound for one in index.packages] == [()] * 4


def test_a_version_that_it_lacks_is_reported(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    public.add(wheel("torch", "2.5"))
    torch = new_index(wheel("torch", "2.4+cpu"))
    with pytest.raises(WorkError, match=r"no version of torch==2\.5\+cpu"):
        bound_torch(tmp_path, public, new_index(*real()).url, torch.url)


TARGETS = ("neuron-mamba2", "neuron29-mamba2")


@pytest.mark.parametrize("target", TARGETS)
def test_the_real_recipe_binds_every_name_of_neurons(target: str, root: Path) -> None:
    what = recipe.find(target, root / "recipes")
    assert what.python.bound() == {*BOUND, "torch"}
    assert what.python.indexes["neuron"].url.startswith("https://")
    locked = lock.load(what, root / "recipes").python
    assert not {one.name for one in locked.packages} & what.python.bound()
    assert {one.name for one in locked.of_indexes()} <= what.python.bound()


@pytest.mark.parametrize("target", TARGETS)
def test_the_real_recipe_has_no_library_of_cudas(target: str, root: Path) -> None:
    """The packages that Neuron's need from the public index are named, too."""
    locked = lock.load(recipe.find(target, root / "recipes"), root / "recipes").python
    names = {one.name for one in locked.packages}
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert {"islpy", "psutil", "scipy", "boto3", "sympy", "torch-xla"} <= names
    (torch,) = locked.bound[0].packages
    assert torch.version.endswith("+cpu")


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_gets_them_from_that_index_alone(target: str, root: Path) -> None:
    what = recipe.find(target, root / "recipes")
    locked = lock.load(what, root / "recipes")
    text = dockerfile.dockerfile(what, locked, root / "images")
    steps = [one for one in text.split("\nRUN ") if "/pip --isolated install" in one]
    assert [re.findall(r"--requirement /run/requirements/(\w+)\.txt", one) for one in steps] == [
        ["pytorch"],  # Neuron's packages need torch
        ["neuron"],
    ]
    for name, install in zip(("pytorch", "neuron"), steps, strict=True):
        assert "PIP_CONFIG_FILE=/dev/null" in install
        assert install.count("index-url") == 1
        assert what.python.indexes[name].url in install
        assert "id=pip" not in install  # the secret with the host's own indexes
    others = dockerfile.requirement_files(what, locked)
    for name in ("pytorch", "neuron"):
        found = set(others.pop(f"{name}.txt").split())
        assert found >= set(what.python.indexes[name].pins())
    assert not [name for name in BOUND if f"\n{name}==" in "\n".join(others.values())]


def installed(vendor: Index, distribution: Distribution, folder: Path) -> Result:
    """Install as in the image, with a lock of this file, on a host with other indexes."""
    requirements = folder / "requirements.txt"
    requirements.write_text(lock.requirements([distribution.locked()]))
    argv = [sys.executable, "-m", "pip", "--isolated", "install", "--no-cache-dir", "--no-deps"]
    argv += ["--require-hashes", "--index-url", vendor.url, "--requirement", str(requirements)]
    argv += ["--disable-pip-version-check", "--target", str(folder / "site")]
    return Programs().attempt(argv, env={"XDG_CONFIG_DIRS": str(folder)})


@pytest.fixture
def everywhere(public: Index, tmp_path: Path) -> Index:
    """The public index, with which pip is configured for every user of this machine."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(f"[global]\nextra-index-url = {public.url}\n")
    return public


def test_pip_takes_the_locked_file_though_the_host_knows_placeholders(
    everywhere: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    done = installed(vendor, wheel("nki", BOUND["nki"], says="real"), tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "site" / "nki.py").read_text() == "SAYS = 'real'\n"


def test_pip_refuses_a_placeholder_by_its_sum(
    everywhere: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*placeholders())
    done = installed(vendor, wheel("nki", BOUND["nki"], says="real"), tmp_path)
    assert done.code != 0
    assert "DO NOT MATCH THE HASHES" in done.err
    assert not (tmp_path / "site").exists()
