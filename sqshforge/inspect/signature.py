"""FILE.sqsh.sig: a squash file's signature, made with an SSH key by ssh-keygen.

It signs not the file but a statement: a few lines of JSON with the file's size, digest and content
key. Signing and verifying a statement takes no time, and the digest is computed in parallel. The
signature follows the statement, as ssh-keygen writes it (OpenSSH's PROTOCOL.sshsig).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from sqshforge.errors import RequestError, WorkError
from sqshforge.host import temporary
from sqshforge.host.files import parse_object, publish
from sqshforge.host.programs import Programs, Result
from sqshforge.squash import request
from sqshforge.squash.request import ARMOR, SIGNATURE_LIMIT
from sqshforge.squash.request import signature_path as beside

NAMESPACE = "sqshforge"  # signatures that the key made for other uses are not valid here
FORMAT = 1


@dataclass(frozen=True)
class Statement:
    """The statement that is signed."""

    size: int  # bytes
    digest: str
    key: str | None  # the content key; None for a file without a record

    def text(self) -> bytes:
        return (json.dumps({"sqshforge": FORMAT, **asdict(self)}, indent=2) + "\n").encode()


@dataclass(frozen=True)
class Signature:
    """A statement and its signature, as read from the file."""

    statement: Statement
    signed: bytes  # the statement's exact bytes
    armor: bytes


def read(file: Path) -> Signature | None:
    """Read the signature beside a squash file; None without one, `WorkError` if it is malformed."""
    path = beside(file)
    if not path.exists():
        return None
    data = b""
    if path.is_file():  # a FIFO would wait for its writer
        with path.open("rb") as opened:
            data = opened.read(SIGNATURE_LIMIT)
    signed, armor, rest = data.partition(ARMOR)
    try:
        facts = parse_object(signed) or {}
        statement = Statement(facts["size"], facts["digest"], facts["key"])
        if facts["sqshforge"] != FORMAT or statement.text() != signed or not armor:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise WorkError(
            "this is not the signature of a squash file",
            where=str(path),
            fix=f"rm {shlex.quote(str(path))}, and sign again",
        ) from None
    return Signature(statement, signed, armor + rest)


@dataclass(frozen=True)
class Key:
    """An SSH key to sign with: a private key, or a public key whose private key an agent has."""

    path: Path
    program: Path

    @classmethod
    def of(cls, path: Path, programs: Programs) -> Key:
        """Use a key; `RequestError` if it does not exist, `MissingError` without ssh-keygen."""
        if not path.is_file():
            raise RequestError(
                "the key does not exist",
                where=str(path),
                fix="ssh-keygen -t ed25519 -f KEY makes one, or name another with --key",
            )
        return cls(path, programs.require("ssh-keygen", "it signs"))

    def sign(self, file: Path, statement: Statement, programs: Programs) -> Path:
        """Sign a statement, put it beside its file, and return its path.

        Raises `WorkError` if ssh-keygen fails, or if a file that is not a signature is in the way.
        """
        read(file)
        signed = statement.text()
        argv: list[str | Path] = [
            self.program,
            "-Y",
            "sign",
            "-q",
            "-n",
            NAMESPACE,
            "-f",
            self.path,
        ]
        armor = programs.capture(argv, stdin=signed).encode()
        if not armor.startswith(ARMOR):
            raise WorkError("ssh-keygen wrote no signature", where=str(self.path))
        publish(signed + armor, beside(file))
        return beside(file)


def signer(found: Signature, signers: Path | None, programs: Programs) -> str:
    """Return who made a signature; `WorkError` if it is invalid or by none of the signers.

    `signers` is an allowed signers file (ssh-keygen(1)); without it, the answer is only which key
    signed.
    """
    program = programs.require("ssh-keygen", "it verifies signatures")
    with temporary.folder("signature") as folder:
        armor = folder / "signature"
        armor.write_bytes(found.armor)
        if signers is None:
            done = programs.attempt(
                [program, "-Y", "check-novalidate", "-n", NAMESPACE, "-s", armor],
                stdin=found.signed,
            )
            return _said(done)
        allowed = folder / "signers"
        lines = signers.read_bytes().split(b"\n")
        refused: WorkError | None = None
        while True:
            allowed.write_bytes(b"\n".join(lines))
            asked = programs.attempt([program, "-Y", "find-principals", "-s", armor, "-f", allowed])
            name = next(iter(asked.out.splitlines()), "")
            if asked.code != 0 or not name:
                raise refused or WorkError(
                    "no allowed signer made the signature", where=str(signers)
                )
            argv: list[str | Path] = [program, "-Y", "verify", "-f", allowed, "-I", name]
            done = programs.attempt([*argv, "-n", NAMESPACE, "-s", armor], stdin=found.signed)
            line = _OF_OTHER_USE.search(done.err) if done.code != 0 else None
            if line is None:
                return f"{name}, {_said(done)}"
            # find-principals reports only the first line with the key. A later one may be good.
            refused = refused or WorkError(
                f"the key of {name} may not sign for the namespace {NAMESPACE}: "
                f"line {line[1]} of {signers.name} has other namespaces",
                where=str(signers),
            )
            lines[int(line[1]) - 1] = b""


_OF_OTHER_USE = re.compile(r":(\d+): key is not permitted for use in signature namespace")


def _said(done: Result) -> str:
    """Return the key of a good signature, as ssh-keygen reports it; `WorkError` for a bad one."""
    said = (done.out or done.err).strip()
    if done.code != 0:
        raise WorkError(f"the signature is invalid: {said}")
    return said.rpartition(" with ")[2]


def statement(file: Path, digest: str) -> Statement:
    """Return the statement to sign for a file with this digest."""
    facts = request.read_record(file)
    return Statement(file.stat().st_size, digest, facts["key"] if facts else None)
