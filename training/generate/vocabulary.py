"""Convert text and tokens for generation, as bytes or by a tokenizer.json. No torch here."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from training.convert.config import read_json
from training.data.tokenize.tokenizer import BYTES, frame, open_tokenizer, read_definition
from training.errors import RequestError, reading

if TYPE_CHECKING:  # it takes torch
    from training.convert.source import Source

TOKENIZER = "tokenizer.json"
LONGEST = 16
"""The most tokens that one character takes."""


class Vocabulary(Protocol):
    """Converts text to tokens and back; `add` returns the text that a next token completes."""

    size: int

    @property
    def eos(self) -> int | None:
        """The token that ends a text, if there is one."""

    def encode(self, text: str) -> list[int]: ...

    def add(self, token: int) -> str: ...

    def end(self) -> str:
        """Return the text that is left at the end."""


class Bytes:
    """Bytes of UTF-8 as tokens, as in training.data.sources."""

    size = 256
    eos = None

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokens:
    """The tokens of a tokenizer.json; a prompt is encoded as in training, without an end."""

    def __init__(self, path: Path) -> None:
        try:
            definition = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise RequestError(f"--tokenizer: {path} cannot be read: {error}") from error
        self._tokenizer = read_definition(str(path), definition)
        # As in training, a text is never cut or padded; it gets only the tokenizer's beginning.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._before, _ = frame(self._tokenizer)
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._path = path
        # The last tokens. The text of the first `_given` was returned already; they stay because
        # the spaces between words depend on them.
        self._ids: list[int] = []
        self._given = 0

    @property
    def eos(self) -> int | None:
        """The token that training.data.tokenize puts at the end of each text."""
        return open_tokenizer(str(self._path)).eos

    def encode(self, text: str) -> list[int]:
        text.encode()  # raises for what is not UTF-8; the library has no error of its own for it
        plain = self._tokenizer.encode(text, add_special_tokens=False).ids
        self._ids = [*self._before, *plain]
        self._given = len(self._ids)
        return list(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self._new()
        waiting = len(self._ids) - self._given
        # Ends in the middle of a character: one of the next tokens completes it, if any does.
        if text.endswith("\ufffd") and waiting < LONGEST:
            return ""
        if text:
            self._ids, self._given = self._ids[self._given :], waiting
        else:  # a token without text, such as one that marks the end
            self._ids.pop()
        return text

    def end(self) -> str:
        return self._new()

    def _new(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._given])
        return self._tokenizer.decode(self._ids)[len(before) :]


def choose_vocabulary(source: Source, given: Path | None) -> Vocabulary:
    """Find the vocabulary to write text in. Raises RequestError if it is not known."""
    if given == Path(BYTES):
        return Bytes()
    if given is not None:
        with reading(given, "--tokenizer: "):
            path = given / TOKENIZER if given.is_dir() else given
            if not path.is_file():
                raise RequestError(f"--tokenizer: {path} does not exist")
        return Tokens(path)
    if found := source.find(TOKENIZER):
        return Tokens(found)
    if source.sizes.vocab_size == Bytes.size:
        return Bytes()
    raise RequestError(
        f"--tokenizer: must be given: {source.home} has no {TOKENIZER}, and a vocabulary of "
        f"{source.sizes.vocab_size:,} is not bytes; fix: name the {TOKENIZER} that it was trained "
        f"with, or {BYTES}"
    )


def end_tokens(source: Source, vocabulary: Vocabulary) -> frozenset[int]:
    """Find the tokens that end a text where transformers looks, or else in the tokenizer.

    Raises RequestError if a file states something that is not a token.
    """
    # A run's folder has another kind of config.json, so only the one beside the weights counts.
    for path in (source.find("generation_config.json"), source.folder / "config.json"):
        stated = read_json(path).get("eos_token_id") if path and path.is_file() else None
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if not all(type(one) is int for one in ids):
                raise RequestError(f"{path}: eos_token_id must be token ids, not {stated!r}")
            return frozenset(ids)
    return frozenset(() if vocabulary.eos is None else (vocabulary.eos,))


def encode(
    vocabulary: Vocabulary, text: str, source: Source, count: int, called: str = "--prompt"
) -> list[int]:
    """Turn a prompt into tokens. Raises RequestError if the model cannot take them."""
    try:
        prompt = vocabulary.encode(text)
    except UnicodeEncodeError:
        raise RequestError(f"{called}: is not UTF-8") from None
    if not prompt:
        raise RequestError(f"{called}: is empty, and a model goes on from at least one token")
    largest = source.sizes.vocab_size
    beyond = [token for token in prompt if token >= largest]
    if beyond:
        raise RequestError(
            f"{called}: token {beyond[0]} is beyond the model's vocabulary of {largest:,}; the "
            f"tokenizer is of another model"
        )
    context = getattr(source.sizes, "context", None)  # Mamba has no limit
    if context is not None and len(prompt) + count > context:
        raise RequestError(
            f"{called}: its {len(prompt):,} tokens and --max-new-tokens={count:,} are more than "
            f"the {context:,} that the model is meant for"
        )
    return prompt
