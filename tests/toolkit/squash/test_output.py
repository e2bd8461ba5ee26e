"""How a squash file gets its name: complete or not at all, once, and never over another's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.host.suggest import sudo
from sqshforge.image.address import Rootfs
from sqshforge.squash import pack as squash
from tests.support import containers, docker_api
from tests.support.packing import FAST, QUIET, ended, pack, run, started, visible
from tests.support.packing import image_fixture as image_fixture
from tests.support.packing import tree_fixture as tree_fixture

pytestmark = pytest.mark.processes


def working_containers(image: str) -> list[str]:
    listed = json.loads(Programs().capture(["buildah", "containers", "--json"])) or []
    return [one["id"] for one in listed if f"buildah://{one['imagename']}" == image]


def being_written(folder: Path) -> bool:
    return any(path.stat().st_size > 1 << 20 for path in folder.glob(".*.tmp"))


def test_a_file_and_its_record(image: str, tmp_path: Path) -> None:
    done = run(image, "-o", tmp_path / "a.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"a\.sqsh: packed in .* s, .* MB\nnext: \S*python\S* -m sqshforge smoke-test .*a\.sqsh\n$",
        done.stdout,
    )
    assert visible(tmp_path) == {"a.sqsh", "a.sqsh.json"}
    assert (tmp_path / "a.sqsh").stat().st_mode & 0o7777 == 0o644
    record = json.loads((tmp_path / "a.sqsh.json").read_text())
    assert record["image"]["reference"] == image
    assert record["size"] == (tmp_path / "a.sqsh").stat().st_size
    assert working_containers(image) == []


def test_a_strict_umask_does_not_make_the_file_private(tree: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        pack(f"rootfs:{tree}", tmp_path / "a.sqsh")
    finally:
        os.umask(before)
    assert (tmp_path / "a.sqsh").stat().st_mode & 0o7777 == 0o644


def test_what_is_up_to_date_is_not_touched(image: str, tmp_path: Path) -> None:
    first = pack(image, tmp_path / "a.sqsh")
    before = first.path.stat()
    second = pack(image, tmp_path / "a.sqsh")
    assert (first.up_to_date, second.up_to_date) == (False, True)
    assert first.path.stat().st_mtime_ns == before.st_mtime_ns
    assert first.path.stat().st_ino == before.st_ino
    assert second.key == first.key
    shown = run(image, "-o", tmp_path / "a.sqsh", "--profile", "fast")
    assert (shown.returncode, "up to date" in shown.stdout) == (0, True)


def test_force_packs_anew_and_gives_the_same(image: str, tmp_path: Path) -> None:
    first = pack(image, tmp_path / "a.sqsh").path.read_bytes()
    again = pack(image, tmp_path / "a.sqsh", squash.Options.of("fast", force=True))
    assert not again.up_to_date
    assert again.path.read_bytes() == first


def edit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"edited")


def truncate(path: Path) -> None:
    os.truncate(path, 1000)


@pytest.mark.parametrize("damage", [edit, truncate, Path.unlink])
def test_a_file_that_was_changed_is_packed_anew(
    damage: Callable[[Path], None], image: str, tmp_path: Path
) -> None:
    path = pack(image, tmp_path / "a.sqsh").path
    whole = path.read_bytes()
    damage(path)
    assert not pack(image, path).up_to_date
    assert path.read_bytes() == whole


def test_another_profile_replaces_the_file(image: str, tmp_path: Path) -> None:
    pack(image, tmp_path / "a.sqsh")
    other = pack(image, tmp_path / "a.sqsh", squash.Options.of("shared"))
    assert not other.up_to_date
    assert pack(image, tmp_path / "a.sqsh", squash.Options.of("shared")).up_to_date


def test_what_is_tested_is_the_file_that_is_there(image: str, tmp_path: Path) -> None:
    """The same image's file counts, whatever its options; another image's is replaced."""
    first = pack(image, tmp_path / "a.sqsh", squash.Options.of("fast"))
    kept = pack(image, tmp_path / "a.sqsh", squash.Options.of("shared", keep=True))
    assert (kept.up_to_date, kept.key) == (True, first.key)
    edit(first.path)
    assert not pack(image, tmp_path / "a.sqsh", squash.Options.of("shared", keep=True)).up_to_date


@pytest.mark.parametrize("record", [None, "{}", "no json", "[]", '{"key": "", "sha256": ""}'])
def test_a_file_that_is_not_ours_stays(record: str | None, tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.sqsh"
    output.write_text("precious")
    if record is not None:
        (tmp_path / "a.sqsh.json").write_text(record)
    refused = run(f"rootfs:{tree}", "-o", output)
    assert refused.returncode == 2
    assert "was not made by sqshforge" in refused.stderr and "--force" in refused.stderr
    assert output.read_text() == "precious"
    forced = run(f"rootfs:{tree}", "-o", output, "--force", "--profile", "fast")
    assert forced.returncode == 0, forced.stderr
    assert output.read_bytes().startswith(b"hsqs")


def test_the_longest_name_and_one_that_is_longer(tree: Path, tmp_path: Path) -> None:
    address, name = f"rootfs:{tree}", "é" * 107 + ".sqsh"  # 219 bytes
    assert run(address, "-o", tmp_path / f"a{name}", "--profile", "fast").returncode == 0
    refused = run(address, "-o", tmp_path / f"aa{name}")
    assert (refused.returncode, "at most 220 bytes" in refused.stderr) == (2, True)
    assert visible(tmp_path) == {f"a{name}", f"a{name}.json"}


def test_a_link_that_leads_nowhere_is_not_replaced(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "a.sqsh").symlink_to("not/there/yet.sqsh")
    with pytest.raises(RequestError, match="was not made by sqshforge"):
        pack(f"rootfs:{tree}", tmp_path / "a.sqsh")
    assert (tmp_path / "a.sqsh").is_symlink()


def test_a_fifo_in_the_place_of_a_signature_stops_no_pack(tree: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.sqsh.sig")
    done = run(f"rootfs:{tree}", "-o", tmp_path / "a.sqsh", "--profile", "fast")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.sqsh.sig").is_fifo()


def test_a_folder_is_not_replaced_even_by_force(tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.sqsh"
    (output / "inside").mkdir(parents=True)
    refused = run(f"rootfs:{tree}", "-o", output, "--force")
    assert (refused.returncode, "is a folder" in refused.stderr) == (2, True)
    assert visible(tmp_path) == {"a.sqsh"}


def test_a_folder_in_the_place_of_the_record_is_seen_before_packing(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.sqsh.json").mkdir()
    refused = run(f"rootfs:{tree}", "-o", tmp_path / "a.sqsh")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error: a folder has the name of the output's record" in refused.stderr
    assert visible(tmp_path) == {"a.sqsh.json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rootfs:/no/such/folder", "-o", "a.sqsh"), "no root file system"),
        (("buildah://sqshforge-no-such", "-o", "a.sqsh"), "buildah has no image"),
        (("oci-folder:x", "-o", "a.sqsh"), "buildah://NAME"),
        (("buildah://x",), "-o FILE.sqsh"),
        (("buildah://x", "-o", "a.sqsh", "--profile", "tiny"), "fast, shared, archive"),
        (("buildah://x", "-o", "a.sqsh", "--jobs", "0"), "--jobs"),
        (("TREE", "-o", "no/such/folder/a.sqsh"), "no/such/folder"),
    ],
)
def test_a_wrong_request(
    words: tuple[str, ...], said: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*(word.replace("TREE", f"rootfs:{tree}") for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and "Traceback" not in done.stderr
    assert visible(tmp_path) == set()


def test_a_folder_is_not_packed_into_itself(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tree / "etc")
    monkeypatch.chdir(tree)
    for address, output in (("rootfs:.", "in.sqsh"), (f"rootfs:{tree}", tmp_path / "link/a.sqsh")):
        refused = run(address, "-o", output)
        assert refused.returncode == 2
        assert "the output lies in the folder that is packed" in refused.stderr
        assert f"fix:   name a file outside of {tree}" in refused.stderr
    assert visible(tree / "etc") == set() and not list(tree.glob("*.sqsh*"))


@pytest.mark.parametrize("text", ["yesterday", "-1", "1.5", "", "²", "99999999999"])
def test_a_source_date_epoch_that_is_none(
    text: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(RequestError, match="SOURCE_DATE_EPOCH"):
        pack(f"rootfs:{tree}", tmp_path / "a.sqsh")
    assert visible(tmp_path) == set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("name", ["a.sqsh", "a [1]*'\"$(id).sqsh"])
def test_a_packer_killed_in_the_middle(
    how: signal.Signals, name: str, image: str, tmp_path: Path, usual_hangup: None
) -> None:
    output = tmp_path / name
    with started(image, "-o", output, "--profile", "archive", "--jobs", "1") as process:
        assert containers.until(lambda: being_written(tmp_path))
        process.send_signal(how)
        ended(process)
        assert not output.exists()
        if how != signal.SIGKILL:
            assert process.returncode == 128 + how
            assert visible(tmp_path) == set()
            assert working_containers(image) == []
        # What still runs of a killed packer does not hinder the next one.
        assert run(image, "-o", output, "--profile", "fast").returncode == 0
    assert visible(tmp_path) == {name, f"{name}.json"}
    assert working_containers(image) == []
    assert pack(image, output).up_to_date


def test_a_second_signal_does_not_cut_the_clearing_up_short(
    image: str, tmp_path: Path, usual_hangup: None
) -> None:
    """A closing terminal may send SIGHUP twice: from the kernel, and from its shell."""
    output = tmp_path / "a.sqsh"
    with started(image, "-o", output, "--profile", "archive", "--jobs", "1") as process:
        assert containers.until(lambda: being_written(tmp_path))
        for how in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(how)
            time.sleep(0.05)
        ended(process)
    # A shell shows both alike: on exit, Python restores the signals' default effect.
    assert process.returncode in (128 + signal.SIGHUP, -signal.SIGHUP)
    assert visible(tmp_path) == set()
    assert working_containers(image) == []


def test_under_nohup_a_packer_goes_on(image: str, tmp_path: Path) -> None:
    output = tmp_path / "a.sqsh"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(image, "-o", output, "--profile", "archive") as process:
            assert containers.until(lambda: being_written(tmp_path))
            process.send_signal(signal.SIGHUP)
            _, err = process.communicate(timeout=300)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.returncode == 0, err
    assert visible(tmp_path) == {"a.sqsh", "a.sqsh.json"}


def test_a_packer_that_is_killed_leaves_the_old_file(image: str, tmp_path: Path) -> None:
    output = pack(image, tmp_path / "a.sqsh").path
    before = output.read_bytes()
    with started(image, "-o", output, "--profile", "archive") as process:
        assert containers.until(lambda: being_written(tmp_path))
        process.kill()
        process.wait()
    assert output.read_bytes() == before
    assert pack(image, output).up_to_date


def test_of_two_packers_one_waits_and_has_nothing_to_do(image: str, tmp_path: Path) -> None:
    output = tmp_path / "a.sqsh"
    words = (image, "-o", output, "--profile", "archive")
    with started(*words) as first:
        assert containers.until(lambda: being_written(tmp_path))
        second = run(*words)
        out, err = first.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), err + second.stderr
    assert "packed in" in out
    assert f"waiting for another packer of {output}" in second.stderr
    assert "up to date" in second.stdout
    assert visible(tmp_path) == {"a.sqsh", "a.sqsh.json"}


def test_a_lock_that_nobody_holds_is_no_lock(tree: Path, tmp_path: Path) -> None:
    (tmp_path / ".a.sqsh.lock").touch()
    pack(f"rootfs:{tree}", tmp_path / "a.sqsh")
    assert visible(tmp_path) == {"a.sqsh", "a.sqsh.json"}


def test_an_engine_whose_stream_breaks_off(tmp_path: Path) -> None:
    """The docker daemon dies while it saves an image."""
    image = b'{"Id": "sha256:1", "Size": 1, "Config": {}}'
    answers = {"/x/json": image, "/history": b"[]", "/get": bytes(3_000_000)}
    folder = tmp_path / "output"
    folder.mkdir()
    with docker_api.answering(answers, cut=True), pytest.raises(WorkError, match="was lost"):
        pack("dockerd://x", folder / "a.sqsh")
    assert visible(folder) == set()


def test_a_machine_without_the_squash_tool(tree: Path, tmp_path: Path) -> None:
    class Without(Programs):
        def which(self, program: str) -> Path | None:
            return None if program == "mksquashfs" else super().which(program)

    with pytest.raises(MissingError, match="mksquashfs") as caught:
        squash.pack(Rootfs(tree), tmp_path / "a.sqsh", FAST, Without(), QUIET)
    assert caught.value.fix == f"{sudo()}apt-get install squashfs-tools"


@pytest.mark.parametrize(("version", "code"), [("4.7.4", 3), ("4.7.5", 0)])
def test_a_squash_tool_that_may_corrupt_files(
    version: str, code: int, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("mksquashfs")
    program = tmp_path / "bin" / "mksquashfs"
    program.parent.mkdir()
    shown = f"[ \"$1\" = -version ] && echo 'mksquashfs version {version} (2025/11/09)' && exit"
    program.write_text(f'#!/bin/sh\n{shown}\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    done = run(f"rootfs:{tree}", "-o", tmp_path / "a.sqsh", "--profile", "fast")
    assert done.returncode == code, done.stderr
    if code:
        assert "mksquashfs 4.7.4 may corrupt what it packs" in done.stderr
        assert f"where: {program}" in done.stderr
        assert "install squashfs-tools 4.7.5 or later" in done.stderr
        assert visible(tmp_path) == {"bin"}
