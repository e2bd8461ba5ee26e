"""Write text with a model: `python -m training.generate CHECKPOINT --prompt=TEXT`.

CHECKPOINT is whatever training.convert reads: a run's folder or one of its checkpoints, a folder of
weights, a Hugging Face or a state-spaces folder; which one is seen from what is in it. The text
after the prompt goes to stdout as it is made. Without --tokenizer, a tokenizer.json in CHECKPOINT
is taken, or else bytes, for a model with a vocabulary of 256. Nothing is downloaded.
Exit codes: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import codecs
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from training.cli import Parser, run_command
from training.errors import RequestError, TrainingError

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from training.convert.source import Source
    from training.models.language import LanguageModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
TOKENIZER = "tokenizer.json"
LONGEST = 16
"""Tokens that one character takes, at most."""
AT_ONCE = 1024
"""Tokens of the prompt that are read at once: more take memory, fewer take time."""


class Vocabulary(Protocol):
    """Between text and tokens; `add` gives the text that a next token completes."""

    size: int

    def encode(self, text: str) -> list[int]: ...

    def add(self, token: int) -> str: ...

    def end(self) -> str:
        """Give what is left at the end."""


class Bytes:
    """Bytes of UTF-8 as tokens, as training.data.sources has them."""

    size = 256

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokens:
    """The tokens of a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise RequestError(
                f"--tokenizer: {path} is read by the library tokenizers, which is not installed "
                f"(pip install tokenizers)"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise RequestError(f"--tokenizer: {path} cannot be read: {error}") from error
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        # The last tokens, of which the first are told; they stay for the spaces between words.
        self._ids: list[int] = []
        self._told = 0

    def encode(self, text: str) -> list[int]:
        self._ids = self._tokenizer.encode(text).ids
        self._told = len(self._ids)
        return list(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self._new()
        waiting = len(self._ids) - self._told
        # Ends in the middle of a character: one of the next tokens completes it, if any does.
        if text.endswith("\ufffd") and waiting < LONGEST:
            return ""
        if text:
            self._ids, self._told = self._ids[self._told :], waiting
        else:  # a token without text, as one that marks the end
            self._ids.pop()
        return text

    def end(self) -> str:
        return self._new()

    def _new(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told])
        return self._tokenizer.decode(self._ids)[len(before) :]


def generate(
    model: LanguageModel, prompt: list[int], count: int, pick: Callable[[Tensor], int]
) -> Iterator[int]:
    """Give `count` tokens that follow a prompt, each picked from the logits (v,) before it.

    The states are those of LanguageModel.start: of one size for Mamba, whatever the length.
    """
    import torch

    device = model.output.device
    states = model.start(1, len(prompt) + count)
    for at in range(0, len(prompt), AT_ONCE):
        ids = torch.tensor([prompt[at : at + AT_ONCE]], device=device)  # (1, l)
        logits = model.advance(ids, states)  # (1, v)
    for made in range(1, count + 1):
        token = pick(logits[0])
        yield token
        if made < count:
            logits = model.advance(torch.tensor([[token]], device=device), states)  # (1, v)


def picker(
    size: int, temperature: float, top_k: int, top_p: float, random: Generator
) -> Callable[[Tensor], int]:
    """Make the choice of the next token from logits (v,), of which the first `size` are tokens.

    temperature 0: the most likely. Else softmax(logits / temperature), of which the top_k most
    likely stay (0: all), and of these the fewest that together have top_p (Holtzman et al. 2020,
    section 3.1). Raises TrainingError if the logits are not finite.
    """
    import torch

    def pick(logits: Tensor) -> int:
        dtype = logits.dtype
        logits = logits[:size].float().cpu()  # (v,), drawn on the CPU: alike on all devices
        if not torch.isfinite(logits).all():
            kind = str(dtype).removeprefix("torch.")
            raise TrainingError(
                f"the model gives logits that are not finite, computed in {kind}: if another "
                f"--dtype changes nothing, its weights are bad"
            )
        if temperature == 0:
            return int(logits.argmax())
        # The largest becomes 0, so that no temperature, however small, overflows.
        logits = (logits - logits.max()) / temperature  # (v,)
        values, tokens = logits.sort(descending=True, stable=True)  # (v,) each
        if top_k:
            values = values[:top_k]  # (k,)
        chances = torch.softmax(values, dim=0)  # (k,)
        # A token stays if those before it have less than top_p, so the first always does.
        stays = chances.cumsum(0) - chances < top_p  # (k,)
        stays[0] = True
        drawn = torch.multinomial(chances * stays, 1, generator=random)  # (1,)
        return int(tokens[drawn])

    return pick


def choose_vocabulary(source: Source, given: Path | None) -> Vocabulary:
    """Find what text is written in. Raises RequestError if that is not known."""
    if given is not None:
        path = given / TOKENIZER if given.is_dir() else given
        if not path.is_file():
            raise RequestError(f"--tokenizer: {path} is not there")
        return Tokens(path)
    if (source.folder / TOKENIZER).is_file():
        return Tokens(source.folder / TOKENIZER)
    if source.sizes.vocab_size == Bytes.size:
        return Bytes()
    raise RequestError(
        f"--tokenizer: must be given: {source.folder} has no {TOKENIZER}, and a vocabulary of "
        f"{source.sizes.vocab_size:,} is not bytes"
    )


def encode(vocabulary: Vocabulary, text: str, source: Source, count: int) -> list[int]:
    """Turn the prompt into tokens. Raises RequestError if the model cannot take them."""
    prompt = vocabulary.encode(text)
    if not prompt:
        raise RequestError("--prompt: is empty, and a model goes on from at least one token")
    largest = source.sizes.vocab_size
    beyond = [token for token in prompt if token >= largest]
    if beyond:
        raise RequestError(
            f"--prompt: token {beyond[0]} is beyond the model's vocabulary of {largest:,}; the "
            f"tokenizer is of another model"
        )
    context = getattr(source.sizes, "context", None)  # Mamba has no limit
    if context is not None and len(prompt) + count > context:
        raise RequestError(
            f"--prompt: its {len(prompt):,} tokens and --max-new-tokens={count:,} are more than "
            f"the {context:,} that the model is meant for"
        )
    return prompt


def write_text(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    given = _parser().parse_args(list(arguments))

    # Torch is not needed to refuse a bad request, nor to help.
    import torch

    from training.convert.folders import detect
    from training.convert.source import Source, load

    has_cuda = torch.cuda.is_available()
    if given.device == "cuda" and not has_cuda:
        raise RequestError("--device: this machine has no GPU that torch can use")
    device = torch.device("cuda" if has_cuda and given.device != "cpu" else "cpu")
    fast = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, fast if given.dtype == "auto" else given.dtype)
    source = Source.open(detect(given.checkpoint), given.checkpoint)
    vocabulary = choose_vocabulary(source, given.tokenizer)
    prompt = encode(vocabulary, given.prompt, source, given.max_new_tokens)
    model = load(source, device, dtype)
    random = torch.Generator().manual_seed(given.seed)
    pick = picker(vocabulary.size, given.temperature, given.top_k, given.top_p, random)
    # Text of any language, whatever the terminal's settings are.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        for token in generate(model, prompt, given.max_new_tokens, pick):
            sys.stdout.write(vocabulary.add(token))
            sys.stdout.flush()
        print(vocabulary.end(), flush=True)
    except BrokenPipeError:
        # The reader has seen enough; python must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser("python -m training.generate", str(__doc__))
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a model")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to go on from")
    for name, read, default, told in (
        ("max-new-tokens", _at_least(int, 1), 200, "tokens to write"),
        ("temperature", _at_least(float, 0), 1.0, "0 takes the most likely token always"),
        ("top-k", _at_least(int, 0), 0, "draw from the K most likely tokens, 0 for all"),
        ("top-p", _share, 1.0, "draw from the fewest tokens that together have chance P"),
        ("seed", _at_least(int, 0), 0, "of the drawing"),
    ):
        parser.add_argument(
            f"--{name}", type=read, default=default, help=f"{told} (default: {default})"
        )
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help=f"a local {TOKENIZER}")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="to compute in; auto: bfloat16 on a GPU, else float32",
    )
    return parser


def _at_least(kind: Callable[[str], Any], least: int) -> Callable[[str], Any]:
    word = "a whole number" if kind is int else "a number"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {word} from {least} on, not {text!r}")
        return value

    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 1, not {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(run_command(write_text, sys.argv[1:]))
