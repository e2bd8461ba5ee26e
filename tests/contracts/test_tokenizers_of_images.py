"""Every image can read a tokenizer made in another one, whatever its release of tokenizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import ByteLevelBPETokenizer

from sqshforge import lock, recipe
from tests.conftest import ROOT

TEXTS = ["the quick brown fox jumps over a lazy dog", "while it rains, nobody looks: 12345"]
READ = """
import json, sys
import tokenizers
from training.data.tokenize.tokenizer import Encoder, open_tokenizer
from training.generate.vocabulary import Tokens

path, text = sys.argv[1:]
encoded = Encoder(open_tokenizer(path), append_eos=True).encode([text]).tolist()
shown = Tokens(__import__("pathlib").Path(path)).encode(text)
print(json.dumps([tokenizers.__version__, encoded, shown]))
"""


def releases() -> list[str]:
    """Return the releases that images have and this environment does not."""
    folder = ROOT / "recipes"
    found = {
        package.version
        for target in recipe.targets(folder)
        for package in lock.read(target, folder).python.packages
        if package.name == "tokenizers"
    }
    return sorted(found - {tokenizers.__version__})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer made as in docs/start/own-data.md, with this environment's release."""
    path = tmp_path_factory.mktemp("made") / "tokenizer.json"
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS * 20, vocab_size=320, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(path))
    return path


def read(path: Path, text: str, *folders: Path) -> list[object]:
    """Return the release that reads a tokenizer, and a text's tokens to train and to generate."""
    path_of_python = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", READ, path, text],
        env={**os.environ, "PYTHONPATH": path_of_python},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("release", releases())
def test_the_release_of_an_image_reads_it_alike(release: str, made: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    argv += ["--disable-pip-version-check", "--target", str(tmp_path), f"tokenizers=={release}"]
    subprocess.run(argv, check=True)
    version, *tokens = read(made, TEXTS[0], tmp_path)
    assert version == release
    assert tokens == read(made, TEXTS[0])[1:]
