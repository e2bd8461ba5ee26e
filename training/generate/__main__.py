"""Write text with a model: `python -m training.generate CHECKPOINT --prompt=TEXT`.

CHECKPOINT is anything that training.convert reads: a run's folder or one of its checkpoints, a
folder of weights, a Hugging Face or a state-spaces folder; the format is detected from its content.
The text after the prompt goes to stdout as it is generated, up to --max-new-tokens or the
end-of-text token that generation_config.json, config.json or else the tokenizer states. With
--prompts, each line of a file is a prompt, and stdout has a line of JSON for each,
{"prompt": ..., "text": ...}, in the file's order; each text is what its prompt alone would give.
Without --tokenizer, a tokenizer.json in CHECKPOINT is used, or else bytes, for a model with a
vocabulary of 256; for a larger one, bytes are asked for by --tokenizer=bytes. Nothing is
downloaded.
Exit codes: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from training.cli import OutputError, Parser, run_command
from training.config.setting import LARGEST
from training.errors import RequestError
from training.generate.decode import generate, picker
from training.generate.vocabulary import (
    BYTES,
    TOKENIZER,
    Vocabulary,
    choose_vocabulary,
    encode,
    end_tokens,
)
from training.imports import loading

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
BATCH = 8
"""The default number of prompts that are continued at once."""


def read_prompts(path: Path) -> list[str]:
    """Read the lines of a file. Raises RequestError if it cannot be read or has none."""
    try:
        # Editors on Windows write a byte order mark at the beginning.
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except OSError as error:
        raise RequestError(f"--prompts: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts: {path} is not UTF-8: {error}") from error
    if lines == [""]:
        raise RequestError(f"--prompts: {path} is empty; fix: write one prompt per line")
    return [line.removesuffix("\r") for line in lines]


def write_text(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    given = _parser().parse_args(list(arguments))
    _refuse_unheeded(given)
    if sys.stdout is None:  # as with `>&-`
        raise OutputError("is closed, and the text goes there")
    texts = [given.prompt] if given.prompts is None else read_prompts(given.prompts)

    with loading():  # torch is needed neither to refuse a bad request nor to print help
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
    ends = end_tokens(source, vocabulary)
    prompts, faults = [], []
    for number, text in enumerate(texts, start=1):
        called = f"--prompts: {given.prompts}: line {number}" if given.prompts else "--prompt"
        try:
            prompts.append(encode(vocabulary, text, source, given.max_new_tokens, called))
        except RequestError as error:
            faults += error.faults
    if faults:
        raise RequestError.of(faults)
    model = load(source, device, dtype)

    def made(several: Sequence[Sequence[int]]) -> Iterator[list[int | None]]:
        # Each prompt has a generator of its own, so that it gives the same text as it would alone.
        temperature = 1.0 if given.temperature is None else given.temperature
        top_k, top_p = given.top_k or 0, given.top_p or 1.0
        picks = [
            picker(
                *(vocabulary.size, temperature, top_k, top_p),
                torch.Generator().manual_seed(given.seed),
            )
            for _ in several
        ]
        return generate(model, several, given.max_new_tokens, picks, ends)

    # Text of any language, whatever the terminal's settings are.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        if given.prompts is None:
            _write_one(vocabulary, texts[0], made(prompts))
        else:
            _write_all(vocabulary, texts, prompts, given.batch_size or BATCH, made)
    except OutputError as error:
        if not error.unread:
            raise


def _write_one(vocabulary: Vocabulary, text: str, made: Iterator[list[int | None]]) -> None:
    """Write what follows a single prompt as it is made."""
    vocabulary.encode(text)
    for (token,) in made:
        assert token is not None, "nothing follows an end"
        sys.stdout.write(vocabulary.add(token))
        sys.stdout.flush()
    print(vocabulary.end(), flush=True)


def _write_all(
    vocabulary: Vocabulary,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    most: int,
    made: Callable[[Sequence[Sequence[int]]], Iterator[list[int | None]]],
) -> None:
    """Write a line for each prompt, in order; prompts of one length are continued together."""
    finished: dict[int, str] = {}
    written = 0
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for _, group in groupby(by_length, key=lambda index: len(prompts[index])):
        alike = list(group)
        for at in range(0, len(alike), most):
            batch = alike[at : at + most]
            steps = list(made([prompts[index] for index in batch]))
            for row, index in enumerate(batch):
                vocabulary.encode(texts[index])  # how the tokens after it are decoded depends on it
                tokens = [token for step in steps if (token := step[row]) is not None]
                finished[index] = "".join(map(vocabulary.add, tokens)) + vocabulary.end()
            while written in finished:
                line = {"prompt": texts[written], "text": finished.pop(written)}
                print(json.dumps(line, ensure_ascii=False), flush=True)
                written += 1


def _refuse_unheeded(given: argparse.Namespace) -> None:
    """Raise RequestError for flags that would change nothing."""
    faults = []
    if given.prompts is None and given.batch_size is not None:
        faults.append("--batch-size: has no effect without --prompts; fix: leave it out")
    if given.temperature == 0:
        faults += [
            f"--{name}: temperature 0 always takes the most likely token; fix: leave one of the "
            "two out"
            for name in ("top-k", "top-p")
            if getattr(given, name.replace("-", "_")) is not None
        ]
    if faults:
        raise RequestError.of(faults)


def _parser() -> Parser:
    parser = Parser("python -m training.generate", str(__doc__))
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a model")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one per line")
    for name, metavar, read, default, text in (
        ("max-new-tokens", "N", _within(int, 1), 200, "tokens to write, at most (default: 200)"),
        ("temperature", "T", _within(float, 0), None, "0: the most likely token (default: 1.0)"),
        ("top-k", "K", _within(int, 0), None, "draw from the K most likely (default: 0, from all)"),
        ("top-p", "P", _share, None, "draw from the fewest with total chance P (default: 1.0)"),
        ("seed", "N", _within(int, 0, LARGEST), 0, "seed of the draws (default: 0)"),
        ("batch-size", "N", _within(int, 1), None, f"prompts at once, at most (default: {BATCH})"),
    ):
        parser.add_argument(f"--{name}", type=read, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help=f"a local {TOKENIZER}, or {BYTES}"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU, if any")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="to compute in; auto: bfloat16 on a GPU, else float32",
    )
    return parser


def _within(
    kind: Callable[[str], Any], least: int, greatest: float = math.inf
) -> Callable[[str], Any]:
    word = "a whole number" if kind is int else "a number"
    reach = f"of at least {least}" if greatest == math.inf else f"from {least} to {greatest}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= greatest or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {word} {reach}, not {text!r}")
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
