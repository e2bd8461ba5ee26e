"""The probe that runs on the nodes: what it sees; that it changes nothing and never hangs."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sqshforge.doctor.cluster import job, node_probe
from sqshforge.host.programs import Programs
from tests.support.instance_trees import card, gpu, write

SOURCE = Path(node_probe.__file__).read_text()
ENROOT = """\
#!/bin/bash
config::init "{settings}/enroot.conf"
mkdir -p "$ENROOT_RUNTIME_PATH" "$ENROOT_CACHE_PATH" "$ENROOT_DATA_PATH" && echo 4.1.2
"""


def test_it_is_python_3_6_and_of_the_standard_library_alone() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 6))
    imported = {
        name.name.partition(".")[0]
        for line in ast.walk(tree)
        if isinstance(line, ast.Import)
        for name in line.names
    } | {line.module for line in ast.walk(tree) if isinstance(line, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    # What is newer than 3.6, and easily used by habit.
    later = {"capture_output", "text", "removeprefix", "removesuffix", "missing_ok", "strict"}
    words = {word.arg for word in ast.walk(tree) if isinstance(word, ast.keyword)}
    words |= {word.attr for word in ast.walk(tree) if isinstance(word, ast.Attribute)}
    assert not words & later


def test_gpus_at_pci_and_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe.shutil, "which", lambda name, path=None: None)
    assert node_probe.nvidia(tmp_path)["cards"] == 0
    for number in range(3):
        gpu(tmp_path, number, 0)
    write(tmp_path / "dev/nvidiactl")
    (tmp_path / "dev/nvidia2").unlink()
    assert node_probe.nvidia(tmp_path) == {"cards": 3, "devices": 2, "cli": "", "version": ""}


@pytest.mark.processes
def test_efa_s_cards_and_libfabric(tmp_path: Path) -> None:
    card(tmp_path, 0)
    card(tmp_path, 1, vendor="0x15b3")
    for number in range(2):
        write(tmp_path / f"sys/bus/pci/devices/0000:0{number}/vendor", "0x1d0f")
        write(tmp_path / f"sys/bus/pci/devices/0000:0{number}/device", "0xefa1")
    write(tmp_path / "dev/infiniband/uverbs0")
    program = tmp_path / "opt/amazon/efa/bin/fi_info"
    write(program, "#!/bin/sh\necho 'fi_info: 2.1.0amzn5.0\nlibfabric: 2.1.0amzn5.0'")
    program.chmod(0o755)
    expected = {"cards": 2, "driven": 1, "devices": 1, "adapters": 2}
    assert node_probe.efa(tmp_path) == {**expected, "libfabric": "2.1.0amzn5.0"}


def test_needrestart_s_last_word_counts(tmp_path: Path) -> None:
    assert node_probe.needrestart(tmp_path)["there"] is False
    main = tmp_path / "etc/needrestart/needrestart.conf"
    write(main, "#$nrconf{restart} = 'a';\n$nrconf{override_rc} = {\n  # qr(^slurm) => 0\n};")
    fine = {"there": True, "mode": "", "ubuntu": False, "exempt": False}
    assert node_probe.needrestart(tmp_path) == fine
    write(tmp_path / "etc/needrestart/conf.d/50.conf", "$nrconf{restart} = 'a';")
    assert node_probe.needrestart(tmp_path)["mode"] == "a"
    write(tmp_path / "etc/needrestart/conf.d/60.conf", '$nrconf{restart} = "l";')
    assert node_probe.needrestart(tmp_path)["mode"] == "l"
    hook = tmp_path / "etc/apt/apt.conf.d/99needrestart"
    write(
        hook, '// apt-pinvoke -m u\nDPkg::Post-Invoke {"/usr/lib/needrestart/apt-pinvoke || true"};'
    )
    assert node_probe.needrestart(tmp_path)["ubuntu"] is False
    write(hook, 'DPkg::Post-Invoke {"/usr/lib/needrestart/apt-pinvoke -m u || true"};')
    assert node_probe.needrestart(tmp_path)["ubuntu"] is True
    for text in (
        "$nrconf{override_rc}{qr(^(slurm|munge))} = 0;",
        "$nrconf{override_rc} = {\n  qr(^slurmd) => 0,\n};",
    ):
        write(tmp_path / "etc/needrestart/conf.d/70.conf", text)
        assert node_probe.needrestart(tmp_path)["exempt"] is True


def test_pyxis_is_found_through_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    write(tmp_path / "slurm.conf", "ClusterName=x")
    assert node_probe.plugstack_line(node_probe.plugstack_file()) == ("", [])
    write(tmp_path / "plugstack.conf", "# required /commented/pyxis.so\ninclude parts/*.conf")
    write(tmp_path / "parts/a.conf", "optional /x/other.so\ninclude a.conf")  # endless recursion
    line = "required /x/spank_pyxis.so use_squashfuse=yes runtime_path=/run/p  # ours"
    write(tmp_path / "parts/b.conf", line)
    plugin, words = node_probe.plugstack_line(node_probe.plugstack_file())
    assert plugin == "/x/spank_pyxis.so" and "use_squashfuse=yes" in words
    write(tmp_path / "slurm.conf", f"PlugStackConfig={tmp_path}/other.conf")
    assert node_probe.plugstack_file() == tmp_path / "other.conf"


def test_folders_are_only_looked_at(tmp_path: Path) -> None:
    found = node_probe.place(tmp_path / "a/b/c")
    assert found["usable"] and not found["there"] and found["above"] == str(tmp_path)
    assert found["free"] > 0 and found["kind"]
    (tmp_path / "file").touch()
    assert not node_probe.place(tmp_path / "file/below")["usable"]
    (tmp_path / "link").symlink_to("nowhere")
    assert not node_probe.place(tmp_path / "link/below").get("usable")
    assert not (tmp_path / "a").exists()
    assert node_probe.kind_of_file_system("/proc/self") == "proc"


def test_the_head_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "a.sqsh"
    path.write_bytes(b"x" * 3_000_000)
    found = node_probe.image(path, 30.0)
    assert (found["size"], found["read"]) == (3_000_000, 3_000_000)
    assert found["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert node_probe.image(path, 0.0)["read"] == 0


def probe(
    folder: Path, seconds: float = 30.0, said: bytes = b"", **variables: str
) -> dict[str, Any]:
    """Run the probe as on a node, with a folder first on the PATH; returns its report."""
    plan = job.Plan(1, "p", names=("n1",))
    words = job.srun(plan, "x", seconds, [folder / "marker"], None)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        words[words.index("sh") :],
        input=said,
        capture_output=True,
        env={**env, **variables},
        timeout=120,
        check=True,
    )
    answers = job.Answers()
    answers.asked_at = 0.0
    for line in done.stdout.splitlines():
        assert len(line) < 1024
        answers.take(line, time.time())
    whole = "".join(answers.pieces["n1"][number] for number in sorted(answers.pieces["n1"]))
    shown: dict[str, Any] = json.loads(whole)
    return {**shown, "clock": answers.clocks.get("n1")}


def stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def faults(shown: Mapping[str, Any]) -> dict[str, str]:
    return {one["check"]: one["text"] for one in shown["faults"]}


@pytest.mark.processes
def test_enroot_is_asked_without_making_its_folders(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    stand_in(tmp_path, "enroot", ENROOT.format(settings=settings))
    write(settings / "enroot.conf", "#ENROOT_DATA_PATH /commented\nENROOT_CACHE_PATH /c/$(id -u)")
    write(
        settings / "enroot.conf.d/a.conf",
        "ENROOT_CACHE_PATH=/later\nENROOT_DATA_PATH=${ENROOT_CACHE_PATH}/data\n"
        "ENROOT_RUNTIME_PATH ${XDG_RUNTIME_DIR}/mine",
    )
    (tmp_path / "marker").write_bytes(b"m")
    shown = probe(tmp_path, said=b"clock\n", TMPDIR="/var/tmp")
    assert faults(shown) == {}
    assert shown["enroot"]["version"] == "4.1.2" and shown["enroot"]["settings"] == str(settings)
    paths = {one["name"]: one["path"] for one in shown["enroot"]["folders"]}
    uid = os.getuid()
    assert paths == {
        "ENROOT_RUNTIME_PATH": "/run/enroot",  # an unset variable is empty, as in enroot
        "ENROOT_CACHE_PATH": f"/c/{uid}",
        "ENROOT_DATA_PATH": f"/c/{uid}/data",
        "ENROOT_TEMP_PATH": "/var/tmp",
    }
    low, high = shown["clock"]
    assert low <= 0 and high > 1.7e9
    assert shown["markers"] == [{"digest": hashlib.sha256(b"m").hexdigest()}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["enroot", "marker", "settings"]
    wins = probe(tmp_path, ENROOT_DATA_PATH="/mine", XDG_RUNTIME_DIR="/run/user/7")
    paths = {one["name"]: one["path"] for one in wins["enroot"]["folders"]}
    assert paths["ENROOT_DATA_PATH"] == "/mine"
    assert paths["ENROOT_RUNTIME_PATH"] == "/run/user/7/mine"
    assert wins["clock"] is None  # it was not asked for


@pytest.mark.processes
def test_what_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """A program hangs while its child holds the output open, and nobody writes to a pipe."""
    stand_in(tmp_path, "enroot", "#!/bin/sh\nsleep 986 & sleep 986\n")
    os.mkfifo(tmp_path / "marker")
    began = time.monotonic()
    shown = probe(tmp_path, seconds=6.0)
    assert time.monotonic() - began < 60
    assert faults(shown) == {"enroot": "no answer within 2 s"}
    assert shown["markers"] == [{"fault": "no answer within 2 s"}]
    assert shown["programs"]["unsquashfs"]
    listed = Programs().attempt(["ps", "-eo", "args"]).out.splitlines()
    assert "sleep 986" not in listed


@pytest.mark.processes
def test_programs_that_fail_are_reported_with_their_words(tmp_path: Path) -> None:
    stand_in(tmp_path, "enroot", "#!/bin/sh\necho 'mkdir: cannot create' >&2; exit 1\n")
    stand_in(tmp_path, "srun", "#!/bin/sh\necho '  --container-image=X'\n")
    stand_in(tmp_path, "unshare", "#!/bin/sh\necho 'unshare failed' >&2; exit 1\n")
    shown = probe(tmp_path)
    assert shown["enroot"]["fault"] == "mkdir: cannot create"
    assert shown["pyxis"]["known"] is True
    assert (
        shown["namespaces"]["works"] is False and shown["namespaces"]["fault"] == "unshare failed"
    )


@pytest.mark.processes
def test_a_node_without_python_says_so(tmp_path: Path) -> None:
    for name in ("sh", "hostname"):
        found = Programs().require(name)
        (tmp_path / name).symlink_to(found.resolve())
    words = job.srun(job.Plan(1, "p", names=("n1",)), "x", 30, [], None)
    done = subprocess.run(
        words[words.index("sh") :],
        capture_output=True,
        env={"PATH": str(tmp_path), "SLURMD_NODENAME": "n1"},
        timeout=60,
        check=True,
    )
    answers = job.Answers()
    answers.take(done.stdout.rstrip(b"\n"), 0.0)
    assert answers.nodes["n1"].python == ""
