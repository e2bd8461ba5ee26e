"""Packages bound to one index: what another one carries under their names is never taken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sqshforge import lock, recipe
from sqshforge.build import dockerfile
from sqshforge.errors import WorkError
from sqshforge.host.mirrors import Mirrors
from sqshforge.host.network import Pip
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock
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
NEEDED = {"libneuronxla": "1.0", "nki": "0.1"}  # by those, which name no version
BOUND = {**NEURON, **NEEDED}
INDEXES = {
    "neuron": {"url": ADDRESS, "packages": [*(f"{n}=={v}" for n, v in NEURON.items()), *NEEDED]}
}

NewIndex = Callable[..., Index]


def real(without: Iterable[str] = ()) -> list[Distribution]:
    """What Neuron's own index has, less some of it."""
    needs = {"torch-neuronx": ["torch-xla", "libneuronxla"], "neuronx-distributed": ["nki>=0.1"]}
    return [
        wheel(name, version, needs=needs.get(name, ()), says="real")
        for name, version in BOUND.items()
        if name not in without
    ]


def placeholders() -> list[Distribution]:
    """What the public index has under those names: the same versions, and higher ones."""
    versions = [(name, one) for name, version in BOUND.items() for one in (version, "99.0")]
    return [wheel(name, version, says="placeholder") for name, version in versions]


@pytest.fixture
def public(new_index: NewIndex) -> Index:
    """An index with the ordinary packages, and with placeholders."""
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
    """The lock of a recipe with Neuron's packages, whose index has that address here."""
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
    with pytest.raises(WorkError, match="nki would come from an index that it is not bound to"):
        resolved(tmp_path, public, vendor.url, "greedy==1.0")


@pytest.mark.parametrize("name", ["libneuronxla", "neuronx-cc"])
def test_a_bound_package_that_its_index_lacks_is_told_by_name(
    name: str, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real(without=[name]))
    with pytest.raises(WorkError, match=f"{name} would come from an index that it is not bound to"):
        resolved(tmp_path, public, vendor.url)


def test_a_bound_version_that_its_index_lacks_is_told_although_another_index_has_it(
    public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real(without=["neuronx-cc"]), wheel("neuronx-cc", "2.15"))
    with pytest.raises(WorkError, match=r"no version of neuronx-cc==2\.16") as caught:
        resolved(tmp_path, public, vendor.url)
    assert "recipes/small.yaml" in caught.value.where
    assert vendor.url in caught.value.mend
    assert "docs/offline.md" in caught.value.mend


@pytest.mark.parametrize("version", ["0.1", "99.0"])
def test_a_folder_of_wheels_brings_no_placeholder_either(
    version: str, public: Index, new_index: NewIndex, tmp_path: Path
) -> None:
    vendor = new_index(*real())
    (tmp_path / "wheels").mkdir()
    placeholder = wheel("nki", version, tag="cp310-cp310-manylinux_2_17_x86_64")
    (tmp_path / "wheels" / placeholder.name).write_bytes(placeholder.data)
    pip = Pip(index=public.url, find_links=(str(tmp_path / "wheels"),))
    with pytest.raises(WorkError, match="nki would come from an index that it is not bound to"):
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


def test_the_real_recipe_binds_every_name_of_neurons(root: Path) -> None:
    what = recipe.find("neuron-mamba2", root / "recipes")
    assert what.python.bound() == set(BOUND)
    assert what.python.indexes["neuron"].url.startswith("https://")
    locked = lock.load(what, root / "recipes").python
    assert not {one.name for one in locked.packages} & set(BOUND)
    assert {one.name for one in locked.bound[0].packages} <= set(BOUND)


def test_the_image_gets_them_from_that_index_alone(root: Path) -> None:
    what = recipe.find("neuron-mamba2", root / "recipes")
    locked = lock.load(what, root / "recipes")
    text = dockerfile.dockerfile(what, locked, root / "images")
    (install,) = (one for one in text.split("\nRUN ") if "requirements/neuron.txt" in one)
    assert "/pip --isolated install" in install
    assert "PIP_CONFIG_FILE=/dev/null" in install
    assert install.count("index-url") == 1
    assert what.python.indexes["neuron"].url in install
    assert "id=pip" not in install  # the secret with the host's own indexes
    others = dockerfile.requirement_files(what, locked)
    assert set(others.pop("neuron.txt").split()) >= set(what.python.indexes["neuron"].pins())
    assert not [name for name in BOUND if f"\n{name}==" in "\n".join(others.values())]


def installed(vendor: Index, distribution: Distribution, folder: Path) -> Result:
    """What pip does as in the image, with the lock of this file, on a host with other indexes."""
    requirements = folder / "requirements.txt"
    requirements.write_text(lock.requirements([distribution.locked()]))
    argv = [sys.executable, "-m", "pip", "--isolated", "install", "--no-cache-dir", "--no-deps"]
    argv += ["--require-hashes", "--index-url", vendor.url, "--requirement", str(requirements)]
    argv += ["--disable-pip-version-check", "--target", str(folder / "site")]
    return Programs().attempt(argv, env={"XDG_CONFIG_DIRS": str(folder)})


@pytest.fixture
def everywhere(public: Index, tmp_path: Path) -> Index:
    """The public index, which pip on this machine is configured with for every user."""
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
