"""Recipes: valid ones load, and all faults of an invalid one are reported together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sqshforge import recipe
from sqshforge.errors import RequestError
from sqshforge.recipe.load import extended

GOOD = """\
target: {name}
title: a test
accelerator: cpu
base:
  image: debian:bookworm-slim
python:
  version: "3.11"
  installer: pip==25.3
  packages: [numpy==2.3.4]
disk_gb: 1
"""


def write(folder: Path, text: str, name: str = "test") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text.replace("{name}", name))
    return path


def faults(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        recipe.load(path)
    assert str(path) in caught.value.where
    return caught.value.what


def test_every_recipe_of_the_project_loads(root: Path) -> None:
    names = recipe.targets(root / "recipes")
    assert "cpu-mamba" in names
    for name in names:
        assert recipe.find(name, root / "recipes").target == name


def test_schema_file_is_the_one_of_the_code(root: Path) -> None:
    assert (root / "recipes" / "schema.json").read_text() == recipe.schema()


def test_all_faults_come_at_once_with_path_line_and_what_is_allowed(tmp_path: Path) -> None:
    text = GOOD.replace("accelerator: cpu", "accelerator: gpu\ntitel: typo").replace(
        "[numpy==2.3.4]", "[numpy>=2, torch==2, torch==3]"
    )
    what = faults(write(tmp_path, text))
    assert "3 faults" in what
    assert "accelerator (line 3): is 'gpu'; allowed: 'cpu', 'cuda' or 'neuron'" in what
    assert "titel (line 4): unknown key; did you mean title? allowed: accelerator, apt" in what
    assert "python.packages[0] (line 10): is 'numpy>=2'; must match" in what


def test_unknown_keys_deep_inside_are_faults_too(tmp_path: Path) -> None:
    what = faults(write(tmp_path, GOOD.replace('"3.11"', '"3.11"\n  verzion: 3')))
    assert "python.verzion (line 8): unknown key; did you mean version?" in what
    assert "allowed: builders, built, indexes, installer, packages, site, version" in what


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (("python:\n", "python: &a\n  b: [\n"), "not valid YAML"),
        (("title: a test", "title: " + "[" * 100_000), "more than 50 lists and mappings within"),
        (("disk_gb: 1", "disk_gb: 1\nenv: &e {A: *e}"), "an alias stands within what it names: e"),
        (("[numpy==2.3.4]", "&p [numpy==2.3.4, [*p]]"), "an alias stands within what it names: p"),
        (('version: "3.11"', "version: 3.11"), "python.version (line 7): is 3.11"),
        (("disk_gb: 1", ""), "disk_gb: is missing"),
        (("title: a test", "title: >\n  a test"), "title (line 2): has a line break"),
        (("title: a test", 'title: "a\\nRUN b"'), "title (line 2): has a line break"),
        (("disk_gb: 1", "disk_gb: 1\nenv:\n  A: |\n    b\n"), "env.A (line 12): has a line break"),
        (("disk_gb: 1", 'disk_gb: 1\nenv: {A: "\\e[1m"}'), "env.A (line 11): has a line break"),
        (("title: a test", "title: a test\ntitle: again"), "title (line 3): stands twice"),
        (("[numpy==2.3.4]", "[Numpy==1, numpy==2]"), "named twice: numpy"),
        (
            ("numpy==2.3.4", "numpy==2.3.x"),
            "python.packages[0] (line 9): Invalid version: '2.3.x'",
        ),
        (("pip==25.3", "pip==25..3"), "python.installer (line 8): Invalid version: '25..3'"),
        (
            ("[numpy==2.3.4]", "[]\n  indexes: {n: {url: 'https://n', packages: [a, b==1.x]}}"),
            "python.indexes.n.packages[1] (line 10): Invalid version: '1.x'",
        ),
        (
            ("disk_gb: 1", "disk_gb: 1\ntriton: {version: 2.2.x, from: wheel}"),
            "triton.version (line 11): Invalid version: '2.2.x'",
        ),
        (("target: {name}", "target: other"), "target: is 'other', and the file's name says"),
        (
            ("slim\n", "slim\n  bootstrap: {suite: sid, snapshot: 20250101T000000Z}\n"),
            "snapshot and mirror go together",
        ),
        (
            ("slim\n", "slim\n  bootstrap: {suite: noble, components: [main, universe]}\n"),
            "components and pockets need a mirror",
        ),
    ],
)
def test_each_kind_of_fault(tmp_path: Path, change: tuple[str, str], shown: str) -> None:
    error = None
    try:
        recipe.load(write(tmp_path, GOOD.replace(*change)))
    except RequestError as raised:
        error = raised
    assert error is not None
    assert error.exit_code == 2
    assert shown in error.what


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n"])
def test_a_file_without_keys_is_an_error(tmp_path: Path, text: str) -> None:
    assert "a recipe is a mapping" in faults(write(tmp_path, text))


def test_an_alias_of_another_part_is_what_that_is(tmp_path: Path) -> None:
    text = GOOD.replace("title: a test", "title: &t a test") + "env: &e {A: *t}\nparameters: *e\n"
    assert recipe.load(write(tmp_path, text)).env == {"A": "a test"}


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in faults(path)


def test_a_day_that_is_not_in_the_calendar(tmp_path: Path) -> None:
    what = faults(write(tmp_path, f"{GOOD}env: {{DAY: 2024-02-30}}\n"))
    assert "not valid YAML: day is out of range for month" in what


def test_an_unknown_target_gets_the_nearest_name(root: Path) -> None:
    with pytest.raises(RequestError) as caught:
        recipe.find("cpu-mambo", root / "recipes")
    assert caught.value.fix == "did you mean cpu-mamba?"


def test_unknown_keys_below_names_that_anybody_may_choose(tmp_path: Path) -> None:
    text = GOOD + "sources:\n  nccl: {git: 'https://example.test/nccl', reff: v2}\n"
    what = faults(write(tmp_path, text))
    assert "sources.nccl.reff (line 12): unknown key; did you mean ref?" in what
    assert "sources.nccl.ref (line 12): is missing" in what


def test_an_unknown_architecture_is_reported_with_those_that_are_known(tmp_path: Path) -> None:
    what = faults(write(tmp_path, GOOD + "cuda: {architectures: ['90', '91']}\n"))
    assert "cuda.architectures[1] (line 11): is '91'; allowed: '70'" in what


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (('"3.11"', "3.10"), 'version (line 7): is 3.10, a number in YAML (3.1); quote it: "3.10"'),
        (("[numpy==2.3.4]", "[1.20]"), 'packages[0] (line 9): is 1.20, a number in YAML (1.2);'),
        (("disk_gb", "cuda: {architectures: [90]}\ndisk_gb"), 'is 90, a number in YAML; quote it:'),
        (("disk_gb", "parameters: {id: 0123}\ndisk_gb"), 'is 0123, a number in YAML (83); quote'),
        (("disk_gb", "parameters: {tag: no}\ndisk_gb"), 'is no, a truth value in YAML (False);'),
        (("disk_gb", "env: {DAY: 2024-01-02}\ndisk_gb"), 'is 2024-01-02, a date in YAML; quote it'),
    ],
)  # fmt: skip
def test_text_that_yaml_takes_for_something_else_is_to_be_quoted(
    tmp_path: Path, change: tuple[str, str], shown: str
) -> None:
    assert shown in faults(write(tmp_path, GOOD.replace(*change)))


def test_a_number_where_no_text_would_do_is_not_to_be_quoted(tmp_path: Path) -> None:
    what = faults(write(tmp_path, GOOD.replace("accelerator: cpu", "accelerator: 3")))
    assert "accelerator (line 3): is 3; allowed: 'cpu', 'cuda' or 'neuron'" in what


def test_a_fault_in_a_list_that_adds_to_the_parent_s_has_its_own_line(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "parent")
    text = "target: child\nextends: parent\ntitle: more\npython:\n  packages:\n    - {}\n"
    child = write(tmp_path, text.format("torch>2"), "child")
    assert "python.packages[1] (line 6): is 'torch>2'; must match" in faults(child)
    child = write(tmp_path, text.format("2.10"), "child")
    assert "python.packages[1] (line 6): is 2.10, a number in YAML (2.1)" in faults(child)


def test_one_recipe_laid_over_another(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "apt: [git]\nenv: {A: '1', B: '2'}\n", "parent")
    child = write(
        tmp_path,
        "target: child\nextends: parent\ntitle: more\napt: [curl]\nenv: {A: '3'}\n"
        "python:\n  packages: [NumPy==1.26.4, torch==2.2.2]\n",
        "child",
    )
    what = recipe.load(child)
    assert what.apt == ("git", "curl")
    assert what.env == {"A": "3", "B": "2"}
    assert what.python.packages == ("NumPy==1.26.4", "torch==2.2.2")
    assert (what.title, what.disk_gb) == ("more", 1)
    write(tmp_path, "target: child\nextends: parent\ntitle: less\napt: null\n", "child")
    assert recipe.load(child).apt == ()


def test_a_pinned_debian_package_takes_the_place_of_the_parent_s() -> None:
    parent = {"packages": ["tools=1.0", "lib", "lib-dev=2"]}
    child = {"packages": ["tools=1.1", "lib=3"]}
    assert extended(parent, child) == {"packages": ["lib-dev=2", "tools=1.1", "lib=3"]}


def test_the_hidden_files_of_editors_are_no_recipes(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "cpu-mamba")
    (tmp_path / ".#cpu-mamba.yaml").symlink_to("nowhere")
    assert recipe.targets(tmp_path) == ["cpu-mamba"]


def test_the_whole_of_an_extending_recipe_stands_alone(tmp_path: Path) -> None:
    parent = write(tmp_path, "# why\n" + GOOD, "parent")
    child = write(tmp_path, "target: child\nextends: parent\ntitle: more\n", "child")
    assert recipe.whole(parent) == parent.read_text()
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "child.yaml"
    alone.write_text(recipe.whole(child))
    assert recipe.load(alone) == recipe.load(child).model_copy(update={"extends": None})


def test_a_recipe_that_extends_itself_is_reported_with_the_way_around(tmp_path: Path) -> None:
    for name, other in (("one", "two"), ("two", "three"), ("three", "one")):
        write(tmp_path, f"target: {name}\nextends: {other}\ntitle: x\n", name)
    with pytest.raises(RequestError, match="extends itself: one -> two -> three -> one"):
        recipe.find("one", tmp_path)


def test_a_recipe_that_extends_nothing_that_is_there(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "cpu-mamba")
    child = write(tmp_path, "target: child\nextends: cpu-mambo\ntitle: x\n", "child")
    with pytest.raises(RequestError, match="unknown target 'cpu-mambo'") as caught:
        recipe.load(child)
    assert caught.value.where == f"{child}, extends"
    assert caught.value.fix == "did you mean cpu-mamba?"


def test_patches_belong_to_something_and_triton_has_its_source(tmp_path: Path) -> None:
    what = faults(write(tmp_path, GOOD + "patches: {nccl: [nccl-2/x.patch]}\n"))
    assert "patches for nccl, which is neither triton, nor in sources" in what
    what = faults(write(tmp_path, GOOD + "triton: {version: 2.2.0, from: source}\n"))
    assert "triton from source needs sources.googletest, sources.triton, archives.cuobjdump" in what
    assert "pybind11 in python.builders" in what


def test_archives_lie_in_one_folder_so_each_has_a_name_of_its_own(tmp_path: Path) -> None:
    first, second = (f"{{url: https://example.test/{one}/tags/v1.0.tar.gz}}" for one in "ab")
    what = faults(write(tmp_path, GOOD + f"archives: {{a: {first}, b: {second}}}\n"))
    assert "archives.a: another archive is named v1.0.tar.gz, too" in what
    what = faults(write(tmp_path, GOOD + "archives: {a: {url: 'https://example.test/a/'}}\n"))
    assert "archives.a: its address ends in no file's name" in what


def test_parameters_stand_in_images_and_all_must_be_given(tmp_path: Path) -> None:
    text = GOOD.replace("debian:bookworm-slim", "'{account}.example.test/smp:{tag}'")
    what = faults(write(tmp_path, text))
    assert "names account, tag, which are not defined in parameters" in what
    path = write(tmp_path, text + "parameters: {account: '1', tag: x}\n")
    loaded = recipe.load(path)
    assert loaded.address(loaded.base.image) == "1.example.test/smp:x"


PARAMETERS = """
parameters: {python: "3.11", torch: 2.2.0}
env: {PYTORCH_VERSION: "{torch}", PLAIN: x}
smoke: {train: {model_name: m, dataset: "text:/lib/python{python}", steps: 60, loss_ratio: 0.5}}
"""


def test_parameters_are_put_in_beside_images_and_set_for_one_use(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace('"3.11"', '"{python}"') + PARAMETERS)
    one = recipe.load(path)
    assert (one.python.version, one.env["PYTORCH_VERSION"]) == ("3.11", "2.2.0")
    two = recipe.find(path.stem, tmp_path, {"python": "3.12"})
    assert two.smoke.train is not None
    assert (two.python.version, two.smoke.train.dataset) == ("3.12", "text:/lib/python3.12")
    assert two.env == one.env == {"PYTORCH_VERSION": "2.2.0", "PLAIN": "x"}
    text = recipe.whole(path, two.parameters)
    assert yaml.safe_load(text)["parameters"] == {"python": "3.12", "torch": "2.2.0"}
    assert "text:/lib/python3.12" in text


def test_a_recipe_that_extends_another_sets_its_parameters(tmp_path: Path) -> None:
    parent = write(tmp_path, GOOD.replace('"3.11"', '"{python}"') + PARAMETERS)
    child = tmp_path / "child.yaml"
    heir = f'target: child\nextends: {parent.stem}\nparameters: {{python: "3.12"}}\n'
    child.write_text(heir)
    assert recipe.load(child).python.version == "3.12"
    assert yaml.safe_load(recipe.whole(child))["python"]["version"] == "3.12"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            ('"3.11"', '"{pyton}"'),
            "python.version: {pyton} names pyton, which are not",
        ),
        (
            ("{torch}", "{tork}"),
            "env.PYTORCH_VERSION: {tork} names tork, which are not",
        ),
        (('{python: "3.11"', "{python: 3.11"), "parameters.python (line 12): is 3.11, a number"),
    ],
)
def test_each_fault_of_a_parameter(tmp_path: Path, change: tuple[str, str], shown: str) -> None:
    assert shown in faults(write(tmp_path, (GOOD + PARAMETERS).replace(*change)))


def test_a_bound_package_may_come_from_nowhere_else(tmp_path: Path) -> None:
    text = GOOD.replace(
        "[numpy==2.3.4]",
        "[neuronx_cc==2.15]\n  indexes:\n    neuron: {url: 'https://n', packages: [neuronx-cc]}",
    )
    assert "bound to an index and also in packages: neuronx-cc" in faults(write(tmp_path, text))


def test_what_only_the_build_from_source_takes_is_left_out_with_the_wheel(root: Path) -> None:
    source = recipe.find("cuda-mamba", root / "recipes")
    assert source.triton is not None
    wheel = source.model_copy(
        update={"triton": source.triton.model_copy(update={"origin": "wheel"})}
    )
    names = {*source.sources, *source.archives}
    assert all(source.builds_with(name) for name in names)
    left_out = {name for name in names if not wheel.builds_with(name)}
    assert left_out == {"triton", "googletest", "llvm", "ptxas", "cuobjdump", "nvdisasm"}


def test_an_archive_has_its_address_first_and_its_mirrors_in_order(tmp_path: Path) -> None:
    text = "archives: {data: {url: 'https://a/x.gz', mirrors: ['https://b/x.gz', 'file:///x']}}\n"
    data = recipe.load(write(tmp_path, GOOD + text)).archives["data"]
    assert data.addresses == ("https://a/x.gz", "https://b/x.gz", "file:///x")
    what = faults(write(tmp_path, GOOD + text.replace("https://b", "b")))
    assert "archives.data.mirrors[0] (line 11)" in what
