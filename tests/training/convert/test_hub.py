"""A model of the hub: its library asks a server on this machine, which answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import torch

from tests.training.support.runs import losses, run, write_text
from training.checkpoint.hub import fetch
from training.convert.__main__ import convert
from training.errors import RequestError
from training.llama_smp import configure
from training.process_group import Group

pytestmark = pytest.mark.processes

COMMIT = "0" * 40
NAME = "someone/tiny-llama"
ENTRY_POINT = ("-m", "training.llama_smp")
FLAGS = ("--max_context_width=32", "--bf16=0", "--max_steps=1", "--train_batch_size=2")


class Hub(ThreadingHTTPServer):
    """Serves the files of one folder as a model's, and records the requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *given: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(whole=False)

    def do_GET(self) -> None:
        self._answer(whole=True)

    def _answer(self, whole: bool) -> None:
        assert isinstance(self.server, Hub)
        path = urlparse(self.path).path
        file = self.server.folder / path.rpartition("/")[2]
        if path.startswith(f"/api/models/{NAME}"):
            files = sorted(self.server.folder.iterdir())
            shown: Any = [
                {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": COMMIT}
                for one in files
            ]
            if "/tree/" not in path:
                siblings = [{"rfilename": one.name} for one in files]
                shown = {"id": NAME, "sha": COMMIT, "siblings": siblings}
            body, kind = json.dumps(shown).encode(), "application/json"
        elif path.startswith(f"/{NAME}/resolve/") and file.is_file():
            body, kind = file.read_bytes(), "application/octet-stream"
            if whole:
                self.server.asked.append(file.name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if whole:
            self.wfile.write(body)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("trained")
    flags = (
        *("--model_type=llama_v2", "--hidden_width=64", "--num_layers=2", "--num_heads=4"),
        *("--intermediate_size=96", "--vocab_size=256", "--lr=1e-2", "--lr_decay_iters=20"),
    )
    save = (f"--checkpoint_dir={folder}/save", f"--training_dir={write_text(folder / 'text')}")
    done = run(0, *flags, *save, *FLAGS, "--max_steps=20", program=ENTRY_POINT)
    assert done.returncode == 0, done.stderr
    convert(["--from", "ours", f"{folder}/save", "--to", "hf", f"{folder}/model"])
    return folder


@pytest.fixture
def hub(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(trained / "model") as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()


def finetuned(folder: Path, trained: Path, ranks: int, *flags: str) -> str:
    given = (*FLAGS, f"--checkpoint_dir={folder}", f"--training_dir=text:{trained}/text/*.txt")
    done = run(ranks, *given, *flags, program=ENTRY_POINT)
    assert done.returncode == 0, done.stderr
    assert losses(folder)[0] < losses(trained / "save")[0] - 0.5
    return done.stdout


def test_it_is_fetched_once_and_trained_from(hub: Hub, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pretrained"
    flags = (
        *("--finetune=1", f"--pretrained_model_name={NAME}"),
        f"--finetune_checkpoint_load_dir={folder}",
    )
    shown = finetuned(tmp_path / "first", trained, 2, *flags)
    assert f"fetching {NAME} from the hub to {folder}" in shown
    assert hub.asked.count("model.safetensors") == 1
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    hub.asked.clear()
    shown = finetuned(tmp_path / "again", trained, 0, *flags)
    assert "fetching" not in shown and hub.asked == []
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "first"), abs=0.2)


def test_without_a_folder_the_library_keeps_it(hub: Hub, trained: Path, tmp_path: Path) -> None:
    finetuned(tmp_path / "run", trained, 0, f"--hf_pretrained_model_name_or_dir={NAME}")
    assert any((tmp_path / "home").rglob("model.safetensors"))


def test_it_is_fetched_ahead_of_a_run(hub: Hub, trained: Path, tmp_path: Path) -> None:
    """It is fetched manually, on a machine with a network."""
    by_hand = ("-m", "training.checkpoint.hub")
    folder = tmp_path / "ahead"
    done = run(0, NAME, str(folder), program=by_hand)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"to start from it: --init_weights={folder}\n")
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    hub.asked.clear()
    assert run(0, NAME, str(folder), program=by_hand).returncode == 0 and hub.asked == []
    missing = run(0, "someone/else", str(tmp_path / "none"), program=by_hand)
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert missing.stderr.startswith("error: someone/else cannot be fetched from the hub: ")


@pytest.mark.parametrize("has_index", [True, False])
def test_what_is_there_in_part_is_fetched_to_the_end(
    hub: Hub, trained: Path, tmp_path: Path, has_index: bool
) -> None:
    """As if fetching had been killed after one of the shards."""
    shards = ("--max-shard-size", "100KB")
    convert(["--from", "hf", f"{trained}/model", "--to", "hf", f"{tmp_path}/all", *shards])
    hub.folder, folder = tmp_path / "all", tmp_path / "part"
    index = "model.safetensors.index.json"
    names = sorted(set(json.loads((hub.folder / index).read_text())["weight_map"].values()))
    assert len(names) > 1
    folder.mkdir()
    for name in ("config.json", names[0], *([index] if has_index else [])):
        shutil.copyfile(hub.folder / name, folder / name)
    done = run(0, NAME, str(folder), program=("-m", "training.checkpoint.hub"))
    assert done.returncode == 0, done.stderr
    for name in (index, *names):
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    hub.asked.clear()
    done = run(0, NAME, str(folder), program=("-m", "training.checkpoint.hub"))
    assert done.returncode == 0 and hub.asked == []


@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_fetches_what_it_has_not(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Two nodes of one rank each do not share the folder; the first already has everything."""

    class Node(Group):
        def any(self, flag: bool) -> bool:
            return True  # the second node lacks it

        def broadcast(self, value: Any) -> Any:
            return True  # found by the first one

        def together(self, work: Any, *, copies: bool = False) -> Any:
            return work()

    folder, fetched = trained / "model" if rank == 0 else tmp_path / "empty", []

    def asks(name: str, question: Any) -> str:
        fetched.append(rank)
        shutil.copytree(trained / "model", folder)
        return str(folder)

    monkeypatch.setattr("training.checkpoint.hub._ask", asks)
    node = Node(rank, 2, 1, torch.device("cpu"), control=None)
    assert fetch(NAME, str(folder), node, lambda line: None) == folder
    assert fetched == ([1] if rank else []), "one that has all needs no network"


def test_what_cannot_be_had_is_reported(hub: Hub, trained: Path, tmp_path: Path) -> None:
    given = (*FLAGS, f"--checkpoint_dir={tmp_path}/run", "--use_synthetic_data=1")
    flag = "hf_pretrained_model_name_or_dir"
    done = run(0, *given, f"--{flag}=someone/else", program=ENTRY_POINT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {flag}: someone/else cannot be fetched from the hub")
    assert "; fix: give a local folder of the model instead" in done.stderr


def test_without_the_library_it_is_reported_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    given = ("--checkpoint_dir=/x", "--use_synthetic_data=1")
    with pytest.raises(RequestError, match="pip install huggingface_hub"):
        configure((*given, f"--hf_pretrained_model_name_or_dir={NAME}"))
