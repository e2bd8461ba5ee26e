"""Text from a model: equal to the full forward pass, streamed, in constant memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.training.support.runs import ROOT, train, write_text
from training import models
from training.cli import run_command
from training.convert import native
from training.convert.__main__ import convert
from training.errors import RequestError, TrainingError
from training.generate import decode
from training.generate.__main__ import write_text as write
from training.generate.vocabulary import LONGEST, Bytes, Tokens
from training.models.language import LanguageModel

LONG = "x" * 300
HEADS: dict[str, Any] = {"d_model": 32, "n_layer": 2, "vocab_size": 256, "n_head": 4, "d_ff": 48}
HYBRID: dict[str, Any] = {
    **{name: HEADS[name] for name in ("d_model", "vocab_size", "n_head", "d_ff")},
    **{"n_kv_head": 2, "n_mamba_head": 4, "mamba_head_dim": 16, "d_state": 8, "chunk_size": 8},
}
FAMILIES: dict[str, models.Sizes] = {
    "mamba": models.MambaConfig(d_model=32, n_layer=2, vocab_size=256),
    "mamba2": models.Mamba2Config(
        d_model=32, n_layer=2, vocab_size=256, d_state=8, head_dim=16, chunk_size=8
    ),
    "llama": models.LlamaConfig(**HEADS, n_kv_head=2),
    "mistral": models.MistralConfig(**HEADS, n_kv_head=2, window=7),
    "mixtral": models.MixtralConfig(**HEADS, n_kv_head=2, n_expert=4),
    "gpt_neox": models.NeoXConfig(**HEADS),
    "bamba": models.BambaConfig(**HYBRID, n_layer=3, pattern="M*M"),
    "granitemoehybrid": models.GraniteHybridConfig(
        **HYBRID, n_layer=3, pattern="M*M", n_expert=4, top_k=2, d_expert=24
    ),
    "nemotron_h": models.NemotronHConfig(**HYBRID, n_layer=4, pattern="M-*M", n_groups=2),
}


def made(sizes: models.Sizes) -> LanguageModel:
    """Make a model with large matrices, so that earlier tokens affect later ones."""
    model = models.build(sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            first = model.initial(name, parameter.shape, 3)  # the parameter's shape
            parameter.copy_(first * (3 if first.ndim > 1 and "A_log" not in name else 1))
    return model.eval().requires_grad_(False)


def folder_of(sizes: models.Sizes, folder: Path) -> Path:
    """Write a folder of weights in our format."""
    folder.mkdir()
    held = {n: p.clone() for n, p in made(sizes).named_parameters()}
    save_file(held, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(native.write_sizes(sizes)))
    return folder


@pytest.fixture
def mamba(tmp_path: Path) -> Path:
    return folder_of(FAMILIES["mamba"], tmp_path / "mamba")


def greedy(size: int = 256) -> Any:
    return decode.picker(size, 0, 0, 1.0, torch.Generator())


def following(
    model: LanguageModel, prompt: list[int], count: int, pick: Any, ends: Any = ()
) -> list[int]:
    """Return the tokens that follow one prompt."""
    made = decode.generate(model, [prompt], count, [pick], ends)
    return [token for (token,) in made if token is not None]


def text_of(*words: Any) -> str:
    """Run the entry point from outside; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "training.generate", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_argmax_of_the_full_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "AT_ONCE", 5)  # the prompt of 13 tokens is read in three pieces
    model = made(FAMILIES[family])
    prompt = torch.randint(256, (13,), generator=torch.Generator().manual_seed(2)).tolist()
    found = following(model, prompt, 20, greedy())
    ids = list(prompt)
    for _ in range(20):
        logits = model(torch.tensor([ids]))[0, -1]  # (v,)
        ids.append(int(logits.argmax()))
    assert found == ids[13:] and len(set(found)) > 3


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_states_do_not_grow(family: str) -> None:
    model = made(FAMILIES[family])

    def size(length: int) -> int:
        states = model.start(1, length)
        for _ in range(length):
            model.advance(torch.tensor([[65]]), states)
        return sum(value.untyped_storage().nbytes() for state in states for value in state.values())

    assert size(3) == size(40)


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def shares(temperature: float, top_k: int, top_p: float, logits: Tensor = LOGITS) -> list[float]:
    pick = decode.picker(4, temperature, top_k, top_p, torch.Generator().manual_seed(1))
    drawn = [pick(logits) for _ in range(3000)]
    return [drawn.count(token) / len(drawn) for token in range(4)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1, 0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1, 2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (1, 99, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1, 0, 0.7, [0, 4 / 7, 0, 3 / 7]),  # the first two add up to 0.7
        (1, 0, 0.71, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1, 0, 1e-9, [0, 1, 0, 0]),
        (1, 3, 0.5, [0, 4 / 7, 0, 3 / 7]),  # of the three left, the first has 4/9
        (0.5, 0, 1.0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (1e-30, 0, 1.0, [0, 1, 0, 0]),
        (1e-46, 0, 1.0, [0, 1, 0, 0]),  # 0 in float32
        (0, 0, 1.0, [0, 1, 0, 0]),
    ],
)
def test_drawing(temperature: float, top_k: int, top_p: float, expected: list[float]) -> None:
    found = shares(temperature, top_k, top_p)
    assert all(abs(a - b) < 0.03 for a, b in zip(found, expected, strict=True)), found
    assert [share == 0 for share in found] == [share == 0 for share in expected]


def test_rows_of_the_embedding_that_are_no_tokens_are_never_drawn() -> None:
    logits = torch.tensor([0.0, 1.0, 50.0])
    assert decode.picker(2, 0, 0, 1.0, torch.Generator())(logits) == 1
    pick = decode.picker(2, 1.0, 0, 1.0, torch.Generator())
    assert {pick(logits) for _ in range(50)} <= {0, 1}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_that_has_gone_wrong(temperature: float) -> None:
    pick = decode.picker(2, temperature, 0, 1.0, torch.Generator())
    with pytest.raises(TrainingError, match="not finite"):
        pick(torch.tensor([0.0, float("nan")]))


def test_bytes_come_out_as_whole_characters() -> None:
    vocabulary = Bytes()
    text = "aé€😀"
    pieces = [vocabulary.add(token) for token in vocabulary.encode(text)]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"] and vocabulary.end() == ""
    assert vocabulary.add(0xE2) == "" and vocabulary.end() == "\ufffd"


def tokenizer(folder: Path, kind: str) -> Path:
    """Write a tokenizer.json trained on a line of text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds

    made = Tokenizer(kinds.BPE(byte_fallback=kind == "metaspace", unk_token=None))
    if kind == "byte level":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        first = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence(
            [
                *(decoders.Replace("▁", " "), decoders.ByteFallback()),
                *(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
            ]
        )
        first = []
    special = ["<end>"] + [f"<0x{byte:02X}>" for byte in range(256) if kind == "metaspace"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=first, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(["the quick fox jumps over the lazy dog, and it rains"], trainer)
    if kind == "metaspace":  # bytes are text, so only the end is special
        held = json.loads(made.to_str())
        held["added_tokens"] = held["added_tokens"][:1]
        made = Tokenizer.from_str(json.dumps(held))
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_tokens_come_out_as_whole_characters_and_words(kind: str, tmp_path: Path) -> None:
    vocabulary = Tokens(tokenizer(tmp_path, kind))
    text = " fox é😀 the dog"
    vocabulary.encode("the quick")
    ids = Tokens(tmp_path / "tokenizer.json").encode(text.removeprefix(" " * (kind[0] == "m")))
    pieces = []
    for token in ids:
        pieces.append(vocabulary.add(token))
        pieces.append(vocabulary.add(0))  # <end> has no text
    assert "".join([*pieces, vocabulary.end()]) == text
    assert "\ufffd" not in "".join(pieces) and len([p for p in pieces if p]) > 5
    assert len(vocabulary._ids) < 12


def test_bytes_that_never_become_a_character_are_reported(tmp_path: Path) -> None:
    vocabulary = Tokens(tokenizer(tmp_path, "byte level"))
    wrong = vocabulary.encode("😀")[0]
    vocabulary.encode("a")
    pieces = [vocabulary.add(wrong) for _ in range(200)]
    assert "\ufffd" in "".join(pieces) and len(vocabulary._ids) <= 2 * LONGEST


def test_the_seed_decides(mamba: Path, capsys: Any) -> None:
    def text(*words: str) -> str:
        assert run_command(write, [str(mamba), "--prompt=the ", *words]) == 0
        said: str = capsys.readouterr().out
        return said

    few = "--max-new-tokens=30"
    assert text(few) == text(few, "--seed=0") != text(few, "--seed=1")
    zero = text(few, "--temperature=0")
    assert zero == text(few, "--temperature=0", "--seed=9") == text(few, "--top-k=1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str, mamba: Path, capsys: Any) -> None:
    words = [str(mamba), "--prompt=the ", "--max-new-tokens=3", f"--dtype={dtype}"]
    assert run_command(write, words) == 0
    assert capsys.readouterr().out


def test_a_tokenizer_that_lies_there_or_is_given(tmp_path: Path, capsys: Any) -> None:
    sizes = models.LlamaConfig(**{**HEADS, "vocab_size": 300}, n_kv_head=2, context=64)
    folder = folder_of(sizes, tmp_path / "llama")
    words = [str(folder), "--prompt=the dog", "--max-new-tokens=9", "--temperature=0"]
    assert run_command(write, words) == 2
    assert "a vocabulary of 300 is not bytes; fix: " in capsys.readouterr().err
    # As in training, where a model's vocabulary may be larger than that of its texts.
    assert run_command(write, [*words, "--tokenizer=bytes"]) == 0 and capsys.readouterr().out
    path = tokenizer(tmp_path, "byte level")
    texts = set()
    for given in ([f"--tokenizer={path}"], [f"--tokenizer={tmp_path}"]):
        assert run_command(write, [*words, *given]) == 0
        texts.add(capsys.readouterr().out)
    tokenizer(folder, "byte level")
    assert run_command(write, words) == 0
    texts.add(capsys.readouterr().out)
    assert len(texts) == 1 and len(texts.pop()) > 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: CHECKPOINT"),
        ("SRC", "one of the arguments --prompt --prompts is required"),
        ("SRC --prompt=", "--prompt: is empty"),
        ("SRC --prompt=x --max-new-tokens=0", "must be a whole number of at least 1, not '0'"),
        ("SRC --prompt=x --max-new-tokens=two", "must be a whole number of at least 1, not 'two'"),
        ("SRC --prompt=x --temperature=-1", "must be a number of at least 0, not '-1'"),
        ("SRC --prompt=x --temperature=nan", "must be a number of at least 0, not 'nan'"),
        ("SRC --prompt=x --temperature=inf", "must be a number of at least 0, not 'inf'"),
        ("SRC --prompt=x --top-k=-1", "must be a whole number of at least 0, not '-1'"),
        ("SRC --prompt=x --top-p=0", "must be more than 0 and at most 1, not '0'"),
        ("SRC --prompt=x --seed=1.5", "must be a whole number from 0 to 9223372036854775807, not"),
        ("SRC --prompt=x --seed=9223372036854775808", "must be a whole number from 0 to"),
        (
            "SRC --prompt=x --temperature=0 --top-k=3",
            "--top-k: temperature 0 always takes the most likely",
        ),
        ("SRC --prompt=x --temperature=0 --top-p=.3", "--top-p: temperature 0 always takes"),
        (
            "SRC --prompt=x --batch-size=3",
            "--batch-size: has no effect without --prompts; fix: leave it out",
        ),
        ("SRC --prompt=x --prompts=y", "argument --prompts: not allowed with argument --prompt"),
        ("SRC --prompts=/nowhere", "--prompts: /nowhere cannot be read: No such file"),
        ("SRC --prompt=x --dtype=int8", "argument --dtype: invalid choice: 'int8'"),
        ("SRC --prompt=x --tokenizer=/nowhere", "--tokenizer: /nowhere does not exist"),
        ("/nowhere --prompt=x", "/nowhere is not a folder"),
        (f"/{LONG} --prompt=x", f"/{LONG}/manifest.json cannot be read: File name too long"),
        (f"SRC --prompt=x --tokenizer={LONG}", f"--tokenizer: {LONG} cannot be read: File name"),
    ],
)
def test_bad_requests(words: str, message: str, mamba: Path, capsys: Any) -> None:
    given = [word.replace("SRC", str(mamba)) for word in words.split()]
    assert run_command(write, given) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_a_prompt_that_the_model_cannot_take(tmp_path: Path, capsys: Any) -> None:
    sizes = models.LlamaConfig(**HEADS, n_kv_head=2, context=20)
    folder = folder_of(sizes, tmp_path / "llama")
    words = [str(folder), f"--prompt={'x' * 11}", "--max-new-tokens=9"]
    assert run_command(write, words) == 0
    assert run_command(write, [*words[:2], "--max-new-tokens=10"]) == 2
    assert "11 tokens and --max-new-tokens=10 are more than the 20" in capsys.readouterr().err
    small = models.MambaConfig(d_model=16, n_layer=1, vocab_size=40)
    folder = folder_of(small, tmp_path / "small")
    tokenizer(folder, "byte level")
    assert run_command(write, [str(folder), "--prompt=the dog"]) == 2
    assert "beyond the model's vocabulary of 40" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_read(
    mamba: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(RequestError, match=r"tokenizer\.json cannot be read by tokenizers "):
        Tokens(path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(RequestError, match="by tokenizers, which cannot be imported"):
        Tokens(path)


@pytest.mark.processes
def test_a_trained_run_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    """Its training shows: nearly all the output consists of words of the text it read."""
    run = tmp_path / "run"
    data = write_text(tmp_path / "text")
    train(run, data, 0, 8, 30, "--seq_length=32", "--learning_rate=1e-2")
    words = ("--prompt=the quick ", "--max-new-tokens=60", "--temperature=0")
    text = text_of(run, *words)
    assert len(text) == 61 and text.endswith("\n")
    known = {"the", "quick", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains"}
    made = text.split()[:-1]
    assert len(made) > 5 and sum(word in known for word in made) >= 0.8 * len(made), text
    convert(["--from", "ours", str(run), "--to", "state-spaces", str(tmp_path / "out")])
    capsys.readouterr()
    for folder in (run / "checkpoints" / "step_30_ckp", tmp_path / "out"):
        assert run_command(write, [str(folder), *words]) == 0
        assert capsys.readouterr().out == text


@pytest.mark.processes
def test_a_reader_that_has_seen_enough(mamba: Path) -> None:
    """As with `| head -c 5`: the pipe is closed while being written to."""
    with subprocess.Popen(
        [sys.executable, "-m", "training.generate", str(mamba), "--prompt=x"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "to", "why"),
    [
        ("SRC --prompt=x", ">/dev/full", "cannot be written: No space left on device"),
        ("SRC --prompts=FILE", ">/dev/full", "cannot be written: No space left on device"),
        ("--help", ">/dev/full", "cannot be written: No space left on device"),
        ("SRC --prompt=x", ">&-", "is closed, and the text goes there"),
    ],
)
def test_text_that_cannot_be_written(
    words: str, to: str, why: str, mamba: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("x\ny\n")
    words = words.replace("SRC", str(mamba)).replace("FILE", str(tmp_path / "prompts"))
    command = f"exec {sys.executable} -m training.generate {words} {to}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"error: standard output {why}\n")
