"""The programs accept every command that a page has its reader type; nothing is run."""

from __future__ import annotations

import importlib.util
import io
import re
import runpy
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from sqshforge import recipe
from sqshforge.build.dockerfile import PROVENANCE
from sqshforge.cli.main import cli
from sqshforge.run import zipapp
from sqshforge.run.passed import PASSED
from tests.contracts.test_system_pages import ENTRIES
from tests.support.command_line import parsed
from tests.support.page_blocks import ROOT, TYPED, Block, blocks, pages
from tests.support.page_commands import Command, commands
from training import __main__ as settings
from training.config.flags import parse
from training.errors import RequestError

LANGUAGES = {TYPED, "yaml", "python", "text"}
NOT_OURS = {
    *(".", "bash", "cat", "cd", "cp", "echo", "eval", "grep", "ls", "printf"),
    *("aws", "buildah", "docker", "mkdir", "pip", "rsync", "skopeo", "ssh", "uv", "zstd"),
    *("neuron_parallel_compile", "nsys", "srun"),
}
"""Programs whose arguments are not checked; an unknown program fails the test."""

PLACEHOLDERS = {"N": "2", "PRESET": "mamba-tiny", "FILE": "configs/mamba_fsdp.yaml"}
"""Values for placeholders whose value a program checks."""
LEFT_OPEN = {"...", "FLAGS", "FLAGS..."}
"""Words that stand for arbitrary further arguments."""

COMPLETION = "_SQSHFORGE_COMPLETE"
"""The variable with which click asks a program of this name for its completion."""

META = {Path(PROVENANCE).name, "lock.json", "recipe.yaml", "sbom.spdx.json"}
"""The files in an image's /sqshforge/meta according to docs/images/provenance.md."""


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the checkout, which paths on a page are relative to, as a rank that logs nothing."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "1")


@pytest.mark.parametrize("page", pages())
def test_each_block_has_its_language(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.where}: {block.language!r}"
        if block.language == "yaml":
            yaml.safe_load(block.text)
        if block.language == "python":
            compile(block.text, block.where, "exec")


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, TYPED)])
def test_each_command_is_one_that_programs_take(page: str) -> None:
    _check(blocks(page, TYPED))


@pytest.mark.parametrize(
    "line",
    [
        *("sqshforg run a.sqsh", "sqshforge pack cpu-mamba --no-hots", "sqshforge build cpu-mambo"),
        *("make sqsh TARGETS=cpu-mamba", "make squash", "make dev TARGET=cpu-mamba"),
        *("python -m training.llama_fsd", "python3 -m training.mamba_fsdp --num_stepz=1"),
        *("python3 -m training.convert --form hf a", "srun python3 -m training.launch --print"),
        *("TRIALS=1 sbatch launch/mamba_fsdp.sbatch", "sbatch launch/mamba.sbatch"),
        *("sbatch launch/llama_fsdp.sbatch --num_layer=2", ".venv/bin/pytest tests/tool"),
        ".venv/bin/pytest tests/toolkit/squash/test_pack.py -k nothing_of_the_kind",
        "unsquashfs -cat smp-llama.sqsh sqshforge/launch/mamba_fsdp.sbatch",
        "sqshforge run a.sqsh -- python3 -m training.generate run --prompts_ x",
        "python -m training --config FILE model.nam=PRESET",
    ],
)
def test_what_is_wrong_is_found(line: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        _check([Block("README.md", 1, TYPED, f"{line}\n")])


def _check(typed: Sequence[Block]) -> None:
    for command in commands(typed):
        program = command.words[0].rpartition("/")[2]
        assert program in CHECKS or program in NOT_OURS, command
        if program in CHECKS:
            words = [_filled(one) for one in command.words[1:] if one not in LEFT_OPEN]
            try:
                CHECKS[program](command, words)
            except (click.ClickException, RequestError) as error:
                pytest.fail(f"{command}\n{getattr(error, 'message', error)}")


def _filled(word: str) -> str:
    word = word.replace("$PWD", str(Path.cwd()))  # as a shell does; our programs refuse it
    return re.sub(r"(?<![\w.])[A-Z]+$", lambda one: PLACEHOLDERS.get(one[0], one[0]), word)


def _sqshforge(command: Command, words: Sequence[str]) -> None:
    _are_read(command)
    if not words:
        return
    context = parsed(cli, words)
    for name in ("target", "subject", "source"):
        value = str(context.params.get(name) or "TARGET")
        if not re.search(r"[/:]|\.sqsh$|^[A-Z]+$", value):
            _is_target(value, command)


def _is_target(name: str, command: Command) -> None:
    """Check that a target is ours, or one that the page itself has the reader write."""
    page = (ROOT / command.where.partition(":")[0]).read_text()
    theirs = re.findall(r"^target: ([\w-]+)$", page, re.MULTILINE)
    assert name in {*recipe.targets(ROOT / "recipes"), *theirs}, f"{command}: no such target"


def _make(command: Command, words: Sequence[str]) -> None:
    _are_read(command)
    text = (ROOT / "Makefile").read_text()
    rules = dict(re.findall(r"^([a-z0-9-]+):(?!=)[^\n]*\n((?:\t[^\n]*\n)*)", text, re.MULTILINE))
    exported = " ".join(re.findall(r"^export (.*)$", text, re.MULTILINE)).split()
    target, *given = words
    assert target in rules, f"{command}: no such target in the Makefile"
    does = rules[target]
    for name, meaning in re.findall(r"^(settings|platform) = (.*)$", text, re.MULTILINE):
        does = does.replace(f"$({name})", meaning)
    for name, value in (one.split("=", 1) for one in given):
        assert name in exported or re.search(rf"\b{name}\)", does), f"{command}: {name} is not used"
        if name == "TARGET":
            _is_target(value, command)


def _python(command: Command, words: Sequence[str]) -> None:
    _are_read(command)
    if "-m" in words:
        at = words.index("-m") + 1
        _module(command, words[at], words[at + 1 :])
    elif words[0].endswith(zipapp.NAME):
        parsed(cli, ["run", *words[1:]])  # it accepts what `sqshforge run` does
    else:
        assert words[0] in ("-", "-c"), command


def _module(command: Command, module: str, words: Sequence[str]) -> None:
    """Entry points parse all their words; for other programs, the help must list the flags."""
    entry = ENTRIES.get(module.removeprefix("training.").replace("_", "-"))
    if entry is not None:
        if command.words[0] == "sbatch":  # the launcher adds more flags
            parse(entry.flags, words, program="", about="")
        else:
            entry.configure([*entry.least.split(), *words])
    elif module == "training" and "--help" not in words:
        settings.configure(words)
    else:
        own = words[: words.index("--")] if "--" in words else words
        flags = {one.partition("=")[0] for one in own if re.match(r"--?[a-z]", one)}
        assert flags <= _flags(module), f"{command}: {flags - _flags(module)}"


@cache
def _flags(module: str) -> set[str]:
    """Return the flags in a program's help."""
    assert importlib.util.find_spec(module), f"no module {module}"
    said = io.StringIO()
    with redirect_stdout(said), pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the module is already loaded
        patch.setattr("sys.argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    assert not ended.value.code, module
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", said.getvalue()))


def _sbatch(command: Command, words: Sequence[str]) -> None:
    names = [one for one in (*words, *command.before[3:]) if one.endswith(".sbatch")]
    assert len(names) == 1, f"{command}: which launcher?"
    launcher = (ROOT / "launch" / Path(names[0]).name).resolve()
    assert launcher.is_file(), f"{command}: no such launcher"
    _are_read(command, launcher.read_text())
    given = [n for n, one in enumerate(words) if one in (names[0], "/dev/stdin")]
    found = re.search(r"^module=(\S+)$", launcher.read_text(), re.MULTILINE)
    assert found
    _module(command, found[1], words[given[0] + 1 :] if given else [])


def _are_read(command: Command, launcher: str = "") -> None:
    """Check that each variable is passed into containers, or read by the launcher or toolkit."""
    patterns = [pattern for one in PASSED for pattern in one.patterns]
    for name in command.variables:
        is_passed = any(fnmatchcase(name, pattern) for pattern in patterns)
        reads = rf"\$\{{{name}[:+/}}-]" if launcher else rf"\"{name}\""
        text = launcher or _toolkit()
        assert is_passed or name == COMPLETION or re.search(reads, text), f"{command}: {name}"


@cache
def _toolkit() -> str:
    return "".join(path.read_text() for path in (ROOT / "sqshforge").rglob("*.py"))


def _pytest(command: Command, words: Sequence[str]) -> None:
    keyword = words[words.index("-k") + 1] if "-k" in words else ""
    paths = [ROOT / one for one in words if "/" in one]
    assert paths and all(path.exists() for path in paths), f"{command}: no such tests"
    tests = "".join(path.read_text() for path in paths if keyword and path.is_file())
    assert not keyword or re.search(rf"def test_\w*{keyword}", tests), f"{command}: no test has it"


def _unsquashfs(command: Command, words: Sequence[str]) -> None:
    option, image, path = words
    folder, _, name = path.removeprefix("sqshforge/").partition("/")
    assert option == "-cat" and path.startswith("sqshforge/"), command
    recipes = ROOT / "recipes"
    target = Path(image).stem if Path(image).stem in recipe.targets(recipes) else "cpu-mamba"
    carried = {f"{one}.sbatch" for one in recipe.find(target, recipes).launchers}
    there = {"launch": {*carried, zipapp.NAME}, "meta": META}
    assert name in there[folder], f"{command}: not in the image"


CHECKS: dict[str, Callable[[Command, Sequence[str]], None]] = {
    "sqshforge": _sqshforge,
    "make": _make,
    **dict.fromkeys(("python", "python3", "torchrun", "composer"), _python),
    "sbatch": _sbatch,
    "pytest": _pytest,
    "unsquashfs": _unsquashfs,
}
