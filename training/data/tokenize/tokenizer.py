"""Turn texts into token ids, by a tokenizer of the library tokenizers or as bytes.

A tokenizer's own way to begin and end a text (such as a template with <s>) is applied to each
document.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.data.libraries import library
from training.errors import RequestError

BYTES = "bytes"
FILE = "tokenizer.json"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Tokens that are taken as the end of a text if nothing beside a tokenizer.json states one."""
PIECE = 2**20
"""Characters that are encoded at once: a tokenizer needs some 100 bytes of memory for each."""
PROBE = "a"
BEFORE = f"{PROBE}\n"
"""Put before the later pieces of a text while they are encoded, if that makes a difference."""

Ids = np.ndarray[Any, np.dtype[np.int32]]
Ends = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as plain data, which can be sent to other processes.

    definition: the text of a tokenizer.json, empty for bytes. longest: the most tokens that its
    model is meant for, None if that is not stated.
    """

    name: str
    definition: str
    vocab_size: int
    eos: int | None = None
    longest: int | None = None

    @property
    def warnings(self) -> list[str]:
        """List what users may not expect. That bytes have no end of text is documented."""
        if self.name == BYTES or self.eos is not None:
            return []
        return [
            f"{self.name} states no end-of-text token, so nothing is put between texts; fix: name "
            "it as eos_token in a tokenizer_config.json beside its tokenizer.json"
        ]

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self.definition.encode(), digest_size=16).hexdigest()


def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer: `bytes`, a tokenizer.json or its folder, or a name of the hub.

    Raises RequestError if it does not exist or cannot be read.
    """
    if name == BYTES:
        return Tokenizer(BYTES, "", 256)
    path = Path(name) / FILE if Path(name).is_dir() else Path(name)
    if path.is_file():
        try:
            definition = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise RequestError(f"--tokenizer: {path} cannot be read: {error}") from error
        return _described(name, definition, _stated(path.parent))
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise RequestError(f"--tokenizer: {path} does not exist")
    return _from_hub(name)


def _described(name: str, definition: str, stated: dict[str, Any]) -> Tokenizer:
    ids: dict[str, int] = _made(name, definition).get_vocab(with_added_tokens=True)
    eos = stated.get("eos_token")
    if isinstance(eos, dict):  # an added token with its properties
        eos = eos.get("content")
    if eos is None:
        eos = next((end for end in ENDS if end in ids), None)
    elif not isinstance(eos, str) or eos not in ids:
        raise RequestError(
            f"--tokenizer: {name}: its end-of-text token, {eos!r}, is not in its vocabulary; "
            "fix: correct eos_token in its tokenizer_config.json"
        )
    return Tokenizer(
        name,
        definition,
        max(ids.values(), default=-1) + 1,
        ids.get(eos) if eos is not None else None,
        _longest(name, stated.get("model_max_length")),
    )


def _longest(name: str, stated: Any) -> int | None:
    """Read how many tokens a text may have; Infinity, as Python writes it, means no limit."""
    if stated is None or stated == math.inf:
        return None
    try:
        return int(stated)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"--tokenizer: {name}: its model_max_length is {stated!r}, and must be a number of "
            "tokens; fix: correct it in its tokenizer_config.json"
        ) from error


def _made(name: str, definition: str) -> Any:
    made = read_definition(name, definition)
    made.no_truncation()
    made.no_padding()
    return made


def read_definition(name: str, definition: str) -> Any:
    """Make a tokenizer from the text of a tokenizer.json, with any release of the library.

    From 0.20 on, the library writes a merge as a pair of tokens, which earlier releases cannot
    read: they get it as one line, as they wrote it themselves. Raises RequestError if it cannot be
    read.
    """
    tokenizers = library("tokenizers", f"--tokenizer: {name} is read")
    try:
        try:
            return tokenizers.Tokenizer.from_str(definition)
        except Exception:
            return tokenizers.Tokenizer.from_str(_with_merges_as_lines(definition))
    except Exception as error:  # the library raises plain Exception
        later = (
            "; fix: if a later release wrote it, use an image that has one, such as cpu-mamba"
            if "untagged enum" in str(error)  # a shape that this release does not know
            else ""
        )
        raise RequestError(
            f"--tokenizer: {name} cannot be read by tokenizers {tokenizers.__version__}: "
            f"{error}{later}"
        ) from error


def _with_merges_as_lines(definition: str) -> str:
    """Join the pairs in merges by spaces; if that is impossible, return the definition as it is."""
    try:
        found = json.loads(definition)
        merges = found["model"]["merges"]
        if any(" " in token for pair in merges for token in pair):
            return definition
        found["model"]["merges"] = [f"{first} {second}" for first, second in merges]
    except (ValueError, KeyError, TypeError):
        return definition
    return json.dumps(found)


def _stated(folder: Path) -> dict[str, Any]:
    """Read the settings beside a tokenizer.json, with its end of text and its longest text."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                found |= {k: v for k, v in json.loads(path.read_text()).items() if v is not None}
            except (OSError, ValueError, AttributeError) as error:
                raise RequestError(f"--tokenizer: {path} cannot be read: {error}") from error
    return found


def _from_hub(name: str) -> Tokenizer:
    """Ask the hub, or its cache on this machine. Never runs code that comes with a tokenizer."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return _from_hub_alone(name)
    try:
        given = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
    except Exception as error:  # the hub has many ways to say no
        raise _absent(name, error) from error
    if not given.is_fast:
        raise RequestError(f"--tokenizer: {name} has no {FILE}; fix: convert it to one first")
    stated = {"eos_token": given.eos_token, "model_max_length": given.model_max_length}
    return _described(name, given.backend_tokenizer.to_str(), stated)


def _from_hub_alone(name: str) -> Tokenizer:
    asked = f"--tokenizer: {name} is not a local file, and the hub is asked"
    tokenizers = library("tokenizers", asked)
    try:
        definition = tokenizers.Tokenizer.from_pretrained(name).to_str()
    except Exception as error:  # the library raises plain Exception
        raise _absent(name, error) from error
    return _described(name, definition, {})


def _absent(name: str, error: Exception) -> RequestError:
    reason = re.split(r"\.\s|\n", str(error).strip())[0]
    return RequestError(
        f"--tokenizer: {name} is not a local file or folder, and the hub does not give it: {reason}"
    )


def frame(made: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer of the library puts before and after every text."""
    plain = made.encode(PROBE, add_special_tokens=False).ids
    whole = made.encode(PROBE).ids
    for at in range(len(whole) - len(plain) + 1):
        if plain and whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []


def ids_before(made: Any) -> list[int]:
    """Return the ids of BEFORE; none if a tokenizer encodes text alike with and without it.

    The tokenizers of Llama 2 and Mistral, for example, put a blank before a text, which must not be
    repeated before each of its pieces.
    """
    before: list[int] = made.encode(BEFORE, add_special_tokens=False).ids
    whole: list[int] = made.encode(BEFORE + PROBE, add_special_tokens=False).ids
    alone: list[int] = made.encode(PROBE, add_special_tokens=False).ids
    is_kept = whole[: len(before)] == before
    return before if is_kept and whole[len(before) :] != alone else []


class Encoder:
    """Encodes documents in one thread; with `append_eos`, each ends with eos."""

    def __init__(self, tokenizer: Tokenizer, append_eos: bool) -> None:
        self._made = _made(tokenizer.name, tokenizer.definition) if tokenizer.definition else None
        before, after = frame(self._made) if self._made else ([], [])
        if append_eos and tokenizer.eos is not None and after[-1:] != [tokenizer.eos]:
            after = [*after, tokenizer.eos]
        self._before, self._after = array("i", before), array("i", after)
        self._ids_before = ids_before(self._made) if self._made else []

    def encode(self, texts: Sequence[str]) -> Ids:
        """Return the concatenated ids (tokens,) of all documents; empty ones have none."""
        return self.encode_each(texts)[0]  # (tokens,)

    def encode_each(self, texts: Sequence[str]) -> tuple[Ids, Ends]:
        """Return the same ids, and where each non-empty document ends in them, (documents,)."""
        if self._made is None:
            parts = [text.encode() for text in texts if text]
            ids = np.frombuffer(b"".join(parts), np.uint8).astype(np.int32)  # (tokens,)
            return ids, np.cumsum([len(part) for part in parts], dtype=np.int64)
        found_ends = array("q")
        # The fast one does not compute tokens' offsets in the text; releases before 0.20 lack it.
        encode = getattr(self._made, "encode_batch_fast", self._made.encode_batch)
        line = array("i")
        skip = len(self._ids_before)
        for batch in _batches(texts):
            found = encode(
                [BEFORE + text if skip and not begins else text for text, begins, _ in batch],
                add_special_tokens=False,
            )
            for encoded, (text, begins, ends) in zip(found, batch, strict=True):
                ids = encoded.ids
                if begins:
                    line += self._before
                elif skip and ids[:skip] == self._ids_before:
                    ids = ids[skip:]
                elif skip:  # its first characters form one token with the newline
                    ids = self._made.encode(text, add_special_tokens=False).ids
                line.fromlist(ids)
                if ends:
                    line += self._after
                    found_ends.append(len(line))
        if not line:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)  # (0,) each
        return np.frombuffer(line, np.int32), np.frombuffer(found_ends, np.int64)


def _batches(texts: Sequence[str]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Group pieces (text, begins a document, ends it) into batches of about PIECE characters."""
    batch: list[tuple[str, bool, bool]] = []
    size = 0
    for text in texts:
        at = 0
        while at < len(text):
            end = _cut(text, at)
            batch.append((text[at:end], at == 0, end == len(text)))
            size += end - at
            at = end
            if size >= PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _cut(text: str, begin: int) -> int:
    """Return where a piece ends: with the text, else after a line, else before a space."""
    end = begin + PIECE
    if end >= len(text):
        return len(text)
    line, space = text.rfind("\n", begin, end), text.rfind(" ", begin + 1, end)
    if line >= begin:
        return line + 1
    return space if space > begin else end
