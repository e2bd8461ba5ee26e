"""`sqshforge verify` and `sqshforge sign`: changes are noticed, and who has signed a file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs, Result
from sqshforge.inspect.verify import verify
from tests.support.archives import Image, file, folder, layer, write
from tests.support.command_line import sqshforge
from tests.support.progress import Following

pytestmark = pytest.mark.processes

IMAGE = Image([layer(folder("d"), file("d/a", os.urandom(100_000)), file("d/b", b"text" * 999))])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed file, two keys, and a file of signers with the first of them."""
    place = tmp_path_factory.mktemp("verify")
    done = sqshforge("pack", write(IMAGE, "oci", place / "oci"), "-o", place / "a.sqsh")
    assert done.code == 0, done.err
    for name in ("ours", "theirs"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", place / name]
        Programs().capture(words)
    (place / "signers").write_text(f"ann@example.org {(place / 'ours.pub').read_text()}")
    return place


@dataclass(frozen=True)
class Desk:
    """A copy of the packed file, to damage."""

    home: Path
    file: Path

    @property
    def record(self) -> Path:
        return self.file.with_name("a.sqsh.json")

    @property
    def signature(self) -> Path:
        return self.file.with_name("a.sqsh.sig")

    @property
    def inodes(self) -> int:
        """The position of the inode table, which is compressed."""
        return int.from_bytes(self.file.read_bytes()[64:72], "little")

    def sign(self, key: str = "ours") -> Result:
        return sqshforge("sign", self.file, "--key", self.home / key)

    def verify(self, *words: str | Path) -> tuple[int, dict[str, tuple[str, str]]]:
        """Return the exit code, and the result and detail of each check."""
        done = sqshforge("verify", self.file, "--json", *words)
        facts = json.loads(done.out)
        assert facts["ok"] is (done.code == 0)
        return done.code, {one["name"]: (one["result"], one["detail"]) for one in facts["checks"]}

    def edit(self, **facts: Any) -> None:
        self.record.write_text(json.dumps({**json.loads(self.record.read_text()), **facts}))

    def flip(self, place: int) -> None:
        data = bytearray(self.file.read_bytes())
        data[place] ^= 1
        self.file.write_bytes(data)


@pytest.fixture
def desk(home: Path, tmp_path: Path) -> Desk:
    for name in ("a.sqsh", "a.sqsh.json"):
        shutil.copy(home / name, tmp_path / name)
    return Desk(home, tmp_path / "a.sqsh")


def test_a_file_as_it_was_packed(desk: Desk) -> None:
    code, checks = desk.verify()
    record = json.loads(desk.record.read_text())
    assert code == 0
    assert checks["structure"][0] == "ok"
    assert checks["record"] == ("ok", record["digest"])
    assert checks["content key"] == ("ok", record["key"])
    assert checks["signature"] == ("absent", "there is no a.sqsh.sig")
    done = sqshforge("verify", desk.file)
    verdict, following = done.out.splitlines()[-2:]
    assert verdict == f"{desk.file}: verified"
    assert following.startswith("next: ") and following.endswith(f"smoke-test {desk.file}")


def test_progress_goes_on_while_the_digest_is_read(tmp_path: Path) -> None:
    large = Image([layer(file("a", os.urandom(40 << 20)))])
    packed = tmp_path / "a.sqsh"
    done = sqshforge("pack", write(large, "oci", tmp_path / "oci"), "-o", packed)
    assert done.code == 0, done.err
    following = Following()
    verify(packed, None, 1, Programs(), following)
    assert following.shares == sorted(following.shares)
    assert following.shares[-1] == 1
    assert sum(0.5 < share < 1 for share in following.shares) >= 2


def test_a_file_of_others(desk: Desk) -> None:
    desk.record.unlink()
    code, checks = desk.verify()
    assert code == 0
    assert checks["structure"][0] == "ok"
    assert checks["record"] == ("absent", "there is no a.sqsh.json of ours")
    assert "content key" not in checks


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (lambda desk: desk.flip(5_000), "record"),  # in content that is stored uncompressed
        (lambda desk: desk.flip(desk.inodes + 9), "structure"),
        (lambda desk: os.truncate(desk.file, 90_000), "structure"),
        (lambda desk: os.truncate(desk.file, desk.file.stat().st_size - 1), "record"),
        (lambda desk: desk.flip(desk.file.stat().st_size - 1), "record"),  # in the padding
        (lambda desk: desk.edit(size=5), "record"),
        (lambda desk: desk.edit(digest="sha256-16MiB:0"), "record"),
        (lambda desk: desk.edit(digest=None), "record"),
        (lambda desk: desk.edit(key="sha256:0"), "content key"),
        (lambda desk: desk.edit(settings={}), "content key"),
        (lambda desk: desk.edit(settings=5), "content key"),
        (lambda desk: desk.edit(image={}), "content key"),
        (lambda desk: desk.edit(image=[]), "content key"),
        (lambda desk: desk.edit(format="8"), "content key"),
    ],
    ids=range(14),
)
def test_what_is_not_as_it_was(desk: Desk, spoil: Callable[[Desk], object], failed: str) -> None:
    spoil(desk)
    code, checks = desk.verify()
    assert code == 1
    assert checks[failed][0] == "FAILED"
    done = sqshforge("verify", desk.file)
    assert done.code == 1
    assert f"{desk.file}: FAILED" in done.out
    assert "next:" not in done.out


def test_a_record_of_another_image(desk: Desk) -> None:
    """Even if its key is right, what it says about the image does not match the file."""
    from sqshforge.squash import request as record
    from sqshforge.squash.request import content_key

    facts = json.loads(desk.record.read_text())
    facts["image"]["env"] = ["PATH=/other"]
    facts["key"] = content_key(record.record_image(facts), facts["settings"])
    desk.record.write_text(json.dumps(facts))
    code, checks = desk.verify()
    assert code == 1
    assert checks["content key"] == ("FAILED", "/etc/environment is not that of the image")


def test_a_file_that_another_version_packed(desk: Desk) -> None:
    """That version computed its key, and enroot's files, from an image differently."""
    earlier = {**json.loads(desk.record.read_text())["image"], "env": ["PATH=/other"]}
    desk.edit(format=7, key=f"sha256:{'0' * 64}", image=earlier)
    assert desk.sign().code == 0
    code, checks = desk.verify("--signers", desk.home / "signers")
    assert code == 0
    result, detail = checks["content key"]
    assert result == "absent" and detail.startswith("made by another version (format 7, not ")
    assert checks["record"][0] == checks["signature"][0] == "ok"
    desk.flip(5_000)
    assert desk.verify()[0] == 1


def test_a_record_that_says_no_format(desk: Desk) -> None:
    """No record had a format at first: it is compared like one of this version."""
    facts = json.loads(desk.record.read_text())
    del facts["format"]
    desk.record.write_text(json.dumps(facts))
    code, checks = desk.verify()
    assert (code, checks["content key"][0]) == (0, "ok")


def test_a_signature(desk: Desk) -> None:
    done = desk.sign()
    assert done.code == 0, done.err
    assert f"{desk.signature}: signed" in done.out
    code, checks = desk.verify("--signers", desk.home / "signers")
    assert code == 0
    assert checks["signature"][0] == "ok"
    assert checks["signature"][1].startswith("ann@example.org, ED25519 key SHA256:")
    code, checks = desk.verify()
    assert code == 0
    assert "--signers FILE tells whose keys are good" in checks["signature"][1]
    assert "yes" in sqshforge("inspect", desk.file).out.partition("signed")[2].splitlines()[0]


def test_the_signers_may_be_set_once(desk: Desk) -> None:
    desk.sign("theirs")
    env = {"SQSHFORGE_SIGNERS": str(desk.home / "signers")}
    done = sqshforge("verify", desk.file, env=env)
    assert done.code == 1
    assert "no allowed signer made the signature" in done.out


def test_a_signature_goes_with_its_file(desk: Desk) -> None:
    desk.sign()
    other = desk.file.with_name("b.sqsh")
    for ending in ("", ".json", ".sig"):
        shutil.move(f"{desk.file}{ending}", f"{other}{ending}")
    assert sqshforge("verify", other, "--signers", desk.home / "signers").code == 0


def test_a_signature_goes_when_its_file_becomes_another(desk: Desk, tmp_path: Path) -> None:
    other = Image([layer(folder("d"), file("d/a", b"other"))])
    desk.sign()
    for name, image, stays in (("same", IMAGE, True), ("other", other, False)):
        address = write(image, "oci", tmp_path / name)
        done = sqshforge("pack", address, "-o", desk.file, "--force")
        assert done.code == 0, done.err
        assert desk.signature.exists() is stays
        assert (f"{desk.signature.name} is removed" in done.err) is not stays
    assert desk.verify()[1]["signature"] == ("absent", "there is no a.sqsh.sig")


def test_what_is_no_signature_of_ours_stays(desk: Desk, tmp_path: Path) -> None:
    desk.signature.write_bytes(b"untrusted comment: another program's")
    address = write(Image([layer(folder("d"))]), "oci", tmp_path / "other")
    assert sqshforge("pack", address, "-o", desk.file).code == 0
    assert desk.signature.exists()


def test_a_broken_signature_goes_by_the_fix_of_its_error(desk: Desk) -> None:
    desk.signature.write_bytes(b"")
    refused = desk.sign()
    assert refused.code == 1
    fix = refused.err.partition("fix:")[2].strip()
    assert fix == f"rm {desk.signature}, and sign again"
    subprocess.run(shlex.split(fix.partition(",")[0]), check=True)
    assert desk.sign().code == 0


def test_a_file_without_a_record_can_be_signed(desk: Desk) -> None:
    desk.record.unlink()
    assert desk.sign().code == 0
    assert desk.verify("--signers", desk.home / "signers")[0] == 0


def spoiled(desk: Desk, old: bytes, new: bytes) -> None:
    data = desk.signature.read_bytes()
    assert old in data
    desk.signature.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (lambda desk: desk.signature.unlink(), "there is no a.sqsh.sig"),
        (lambda desk: desk.sign("theirs"), "no allowed signer"),
        (lambda desk: desk.signature.write_bytes(b"\xff\n"), "not the signature of a squash file"),
        (lambda desk: desk.signature.write_bytes(b""), "not the signature of a squash file"),
        (lambda desk: spoiled(desk, b'"size": ', b'"size": 1'), "is invalid"),
        (lambda desk: spoiled(desk, b"{", b"{ "), "not the signature of a squash file"),
        (lambda desk: spoiled(desk, b"U1NIU0", b"U1NIU1"), ""),
        (
            lambda desk: desk.edit(key="sha256:0"),
            "signed it with another content key",
        ),
        (lambda desk: desk.flip(desk.file.stat().st_size - 1), "signed another file"),
    ],
    ids=range(9),
)
def test_a_signature_that_is_not_good(
    desk: Desk, spoil: Callable[[Desk], object], shown: str
) -> None:
    desk.sign()
    spoil(desk)
    code, checks = desk.verify("--signers", desk.home / "signers")
    assert code == 1
    assert checks["signature"][0] == "FAILED"
    assert shown in checks["signature"][1]


def test_a_signature_of_another_use_of_the_key(desk: Desk) -> None:
    """A signature that somebody got for a mail does not vouch for a squash file."""
    desk.sign()
    statement = desk.signature.read_bytes().partition(b"-----BEGIN")[0]
    argv: list[str | Path] = [
        "ssh-keygen",
        "-Y",
        "sign",
        "-q",
        "-n",
        "email",
        "-f",
        desk.home / "ours",
    ]
    armor = Programs().capture(argv, stdin=statement).encode()
    desk.signature.write_bytes(statement + armor)
    code, checks = desk.verify("--signers", desk.home / "signers")
    assert code == 1
    assert "is invalid" in checks["signature"][1]


def test_a_key_that_is_allowed_for_other_uses_alone(desk: Desk) -> None:
    desk.sign()
    key = (desk.home / "ours.pub").read_text()
    signers = desk.file.with_name("signers")
    of_git = f'# keys\nann@git namespaces="git" {key}'
    signers.write_text(of_git)
    code, checks = desk.verify("--signers", signers)
    assert code == 1
    assert checks["signature"] == (
        "FAILED",
        "the key of ann@git may not sign for the namespace sqshforge: "
        "line 2 of signers has other namespaces",
    )
    signers.write_text(f"{of_git}ann@example.org {key}")
    code, checks = desk.verify("--signers", signers)
    assert code == 0
    assert checks["signature"][1].startswith("ann@example.org, ED25519 key SHA256:")


def test_signed_anew(desk: Desk) -> None:
    """A new signature replaces an old one, but never another file."""
    desk.sign("theirs")
    assert desk.sign("ours").code == 0
    assert desk.verify("--signers", desk.home / "signers")[0] == 0
    desk.signature.write_text("my notes")
    done = desk.sign("ours")
    assert done.code == 1
    assert "not the signature of a squash file" in done.err
    assert desk.signature.read_text() == "my notes"


def test_a_spoiled_file_is_not_signed(desk: Desk) -> None:
    desk.flip(5_000)
    done = desk.sign()
    assert done.code == 1
    assert "was not signed" in done.err
    assert not desk.signature.exists()


def test_a_wrong_request(desk: Desk) -> None:
    done = desk.sign("none")
    assert done.code == 2
    assert "ssh-keygen -t ed25519" in done.err
    done = sqshforge("verify", desk.file, "--signers", desk.home / "none")
    assert done.code == 2
    assert "file of allowed signers" in done.err
    for words in (["verify"], ["sign", "--key", desk.home / "ours"]):
        done = sqshforge(*words, desk.file.with_name("none.sqsh"))
        assert done.code == 2
        assert "no such squash file" in done.err


def test_a_key_that_is_none(desk: Desk) -> None:
    desk.signature.unlink(missing_ok=True)
    (desk.file.parent / "key").write_text("no key")
    done = sqshforge("sign", desk.file, "--key", desk.file.parent / "key")
    assert done.code == 1
    assert "ssh-keygen" in done.err
    assert not desk.signature.exists()


def test_without_ssh_keygen(desk: Desk) -> None:
    desk.sign()
    env = {"PATH": str(desk.file.parent)}
    for words in (["verify"], ["sign", "--key", desk.home / "ours"]):
        done = sqshforge(*words, desk.file, env=env)
        assert done.code == 3
        assert "apt-get install openssh-client" in done.err
