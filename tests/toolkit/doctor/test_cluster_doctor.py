"""What the doctor concludes from the reports of nodes: pure functions, no nodes, no Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqshforge.doctor.cluster import cluster_findings, facts
from sqshforge.doctor.cluster.cluster_findings import HERE, Row, folded, rows
from sqshforge.doctor.cluster.facts import Image, Marker, Node, Place
from sqshforge.doctor.cluster.node_findings import Asked

GB = 10**9
IMAGE = Path("/fsx/a.sqsh")
CLOSE = (-0.01, 0.02)
FOLDERS = tuple(
    {"name": f"ENROOT_{name}_PATH", "path": f"/run/{name}", "there": True, "above": f"/run/{name}"}
    | {"usable": True, "kind": "tmpfs", "free": 50 * GB}
    for name in ("RUNTIME", "CACHE", "DATA", "TEMP")
)
FINE: Mapping[str, Any] = {
    "uid": 1000,
    "python": "3.11.2",
    "kernel": "6.8.0-1021-aws",
    "installer": "apt-get",
    "memlock": -1,
    "enroot": {
        "path": "/usr/bin/enroot",
        "version": "4.1.2",
        "settings": "/etc/enroot",
        "hook": True,
        "folders": FOLDERS,
    },
    "pyxis": {"known": False},
    "fuse": {"there": True, "open": True},
    "programs": {"squashfuse": "/usr/bin/squashfuse", "unsquashfs": "4.6.1"},
    "namespaces": {"works": True},
    "needrestart": {"there": False},
    "markers": [{"digest": "a1"}],
    "image": {"size": 5 * GB, "read": 64 << 20, "seconds": 0.5, "digest": "f0"},
}
ASKED = Asked(
    folders=(Path("/fsx"),),
    digests=("a1",),
    image=IMAGE,
    head=Image(size=5 * GB, read=64 << 20, digest="f0"),
)


@pytest.fixture(autouse=True)
def ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be an ordinary user: for root, the suggested commands have no sudo."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def node(name: str = "n1", **changed: Any) -> Node:
    """Return a node where everything is fine, except for these parts of its report."""
    shown = json.loads(json.dumps(FINE))
    for part, values in changed.items():
        shown[part] = (
            {**shown[part], **values} if isinstance(values, dict) and part in shown else values
        )
    return facts.node(shown, name)


def judged(*nodes: Node, asked: Asked = ASKED) -> list[Row]:
    return rows(nodes, asked, {one.node: CLOSE for one in nodes})


def gaps(*nodes: Node, asked: Asked = ASKED) -> dict[str, Row]:
    """Return what is needed but missing, by name."""
    found = judged(*nodes, asked=asked)
    return {row.finding.what: row for row in found if row.finding.needed and not row.finding.ok}


def one(what: str, *nodes: Node, asked: Asked = ASKED) -> Row:
    """Return the only row of a kind."""
    (found,) = several(what, *nodes, asked=asked)
    return found


def several(what: str, *nodes: Node, asked: Asked = ASKED) -> list[Row]:
    return [row for row in judged(*nodes, asked=asked) if row.finding.what.startswith(what)]


def test_nodes_that_agree_share_their_rows_and_lack_nothing() -> None:
    nodes = [node(f"n{number}") for number in range(1, 5)]
    assert gaps(*nodes) == {}
    for row in judged(*nodes):
        assert row.nodes == ("n1", "n2", "n3", "n4")
    row = one("enroot", *nodes)
    assert row.lines(8) == ["ok      n[1-4]    enroot: 4.1.2, /usr/bin/enroot"]


def test_rows_are_in_the_order_of_the_checks_whichever_node_has_them() -> None:
    gpus = node("n2", nvidia={"devices": 1, "cli": "/usr/bin/x"})
    whats = list(dict.fromkeys(row.finding.what for row in judged(node("n1"), gpus)))
    alone = [row.finding.what for row in judged(gpus)]
    assert whats == alone


def test_a_node_that_differs_is_kept_apart_with_what_mends_it() -> None:
    bad = node("n3", fuse={"there": True, "open": False, "mode": "0600", "fault": "denied"})
    (fine, missing) = several("/dev/fuse", node("n1"), node("n2"), bad)
    assert fine.nodes == ("n1", "n2") and fine.finding.ok
    assert missing.lines(6) == [
        "MISSING n3      /dev/fuse (mounts an image): not open to uid 1000: denied (mode 0600)",
        "          fix: sudo modprobe fuse && sudo chmod 0666 /dev/fuse",
    ]


@pytest.mark.parametrize(
    ("changed", "what", "detail", "fix"),
    [
        ({"python": ""}, "python3", "nothing else was seen", "apt-get install python3"),
        ({"enroot": {"fault": "no home"}}, "enroot", "fails: no home", "`enroot version`"),
        ({"programs": {"squashfuse": ""}}, "squashfuse", "not found", "install squashfuse"),
        ({"programs": {"unsquashfs": ""}}, "unsquashfs", "not found", "install squashfs-tools"),
        (
            {"installer": "dnf", "programs": {"unsquashfs": ""}},
            "unsquashfs",
            "not found",
            "dnf install squashfs-tools",
        ),
        ({"fuse": {"there": False, "open": False}}, "/dev/fuse", "not there", "modprobe fuse"),
        (
            {"namespaces": {"works": False, "fault": "Operation not permitted"}},
            "user namespaces",
            "Operation not permitted",
            "slurmd is confined",
        ),
        (
            {
                "namespaces": {
                    "works": False,
                    "settings": [
                        {"name": "user.max_user_namespaces", "value": 90000},
                        {"name": "kernel.apparmor_restrict_unprivileged_userns", "value": 1},
                    ],
                }
            },
            "user namespaces",
            "AppArmor",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"nvidia": {"cards": 8, "devices": 7}}, "NVIDIA GPUs", "8 at PCI, 7", "nvidia-smi"),
        ({"nvidia": {"cards": 8, "devices": 8}}, "nvidia-container-cli", "not found", "libnvidia"),
        (
            {"nvidia": {"devices": 8, "cli": "/usr/bin/x"}, "enroot": {"hook": False}},
            "enroot's hook for GPUs",
            "/etc/enroot/hooks.d/98-nvidia.sh is not there",
            "chmod +x",
        ),
        ({"efa": {"cards": 4, "driven": 0}}, "EFA", "4 cards, 0 with a driver", "EFA installer"),
        (
            {"efa": {"cards": 4, "driven": 4, "devices": 4, "adapters": 4}, "memlock": 65536},
            "limit on locked memory",
            "at most 64 KiB",
            "LimitMEMLOCK=infinity",
        ),
        ({"markers": [{"fault": "No such file or directory"}]}, "folder /fsx", "No such", "mount"),
        ({"markers": [{"digest": "b2"}]}, "folder /fsx", "another file", "mount"),
        ({"markers": []}, "folder /fsx", "no answer", "mount"),
        (
            {"image": {"read": 0}, "faults": [{"check": "image", "text": "Permission denied"}]},
            f"image {IMAGE}",
            "not read: Permission denied",
            "STAGE",
        ),
        ({"image": {"digest": "f1"}}, f"image {IMAGE}", "another file", "copy it anew"),
        (
            {"faults": [{"check": "efa", "text": "no answer within 40 s"}]},
            "the check efa",
            "no answer within 40 s",
            "look at the node",
        ),
    ],
)
def test_each_gap_has_its_row(changed: dict[str, Any], what: str, detail: str, fix: str) -> None:
    found = gaps(node("n1"), node("n2", **changed))
    (row,) = [row for name, row in found.items() if name.startswith(what)]
    assert row.nodes == ("n2",)
    assert detail in row.finding.detail and fix in row.finding.fix


@pytest.mark.parametrize(
    ("changed", "what", "detail"),
    [
        ({"memlock": 65536}, "limit on locked memory", "at most 64 KiB"),
        ({"image": {"seconds": 30.0}}, f"image {IMAGE}", "the first 64 MiB in 30.0 s"),
        ({"needrestart": {"there": True, "mode": "a"}}, "needrestart", "$nrconf{restart} is 'a'"),
        ({"needrestart": {"there": True, "ubuntu": True}}, "needrestart", "Ubuntu's mode"),
        ({"efa": {"cards": 1, "driven": 1, "devices": 1, "adapters": 1}}, "fi_info", "no fi_info"),
        ({"enroot": {"version": "3.4.1"}}, "enroot", "3.4.1, /usr/bin/enroot; not as on n1"),
        ({"nvidia": {"cards": 7, "devices": 7, "cli": "/c"}}, "NVIDIA GPUs", "7; not as on n1"),
    ],
)
def test_what_is_only_better_otherwise_is_no_gap(
    changed: dict[str, Any], what: str, detail: str
) -> None:
    found = several(what, node("n1"), node("n2", **changed))
    (row,) = [row for row in found if row.nodes == ("n2",)]
    assert not row.finding.ok and not row.finding.needed and detail in row.finding.detail
    assert gaps(node("n1"), node("n2", **changed)) == {}


@pytest.mark.parametrize(
    "shown",
    [
        {"there": True, "mode": "l"},
        {"there": True, "ubuntu": True, "mode": "l"},
        {"there": True, "mode": "a", "exempt": True},
        {"there": False, "mode": "a"},
    ],
)
def test_a_needrestart_that_leaves_slurm_alone_is_fine(shown: dict[str, Any]) -> None:
    assert one("needrestart", node(needrestart=shown)).finding.ok


def test_what_most_nodes_have_is_right() -> None:
    odd = node("n3", enroot={"version": "3.4.1"})
    (most, few) = several("enroot", node("n1"), node("n2"), odd)
    assert most.finding.ok and most.nodes == ("n1", "n2")
    assert few.nodes == ("n3",) and few.finding.fix == "the same on all nodes of a partition"
    # Of two nodes, nobody can say which one is right.
    assert not any(row.finding.ok for row in several("enroot", node("n1"), odd))


def test_the_runtime_of_all_is_that_of_the_first_node() -> None:
    bare = node("n2", enroot={"path": ""})
    row = gaps(node("n1"), bare)["container runtime"]
    assert row.nodes == ("n2",)
    assert "enroot where the first node of a job is of n1" in row.finding.detail
    assert "install enroot" in row.finding.fix
    alone = one("container runtime", bare)
    assert alone.finding.ok and "sqshforge-run.pyz" in alone.finding.detail


def test_enroot_may_have_namespaces_that_others_have_not() -> None:
    profile = {"works": False, "enroot": True, "fault": "denied"}
    row = one("user namespaces", node(namespaces=profile))
    assert row.finding.ok and row.finding.detail == "allowed to enroot alone"
    assert "user namespaces" in gaps(node(namespaces=profile, enroot={"path": ""}))


def test_pyxis_is_reported_with_what_it_does_to_an_image() -> None:
    known = {"known": True, "version": "0.24.0", "plugin": "/x.so"}
    unpacks = node(pyxis=known)
    assert "each start unpacks the image" in one("pyxis", unpacks).finding.detail
    assert "use_squashfuse is not set" in one("pyxis", unpacks).finding.detail
    mounts = node(pyxis={**known, "squashfuse": True})
    assert "squashfuse mounts an image" in one("pyxis", mounts).finding.detail
    # To unpack, no squashfuse is needed, but enough space is.
    assert gaps(node(pyxis=known, programs={"squashfuse": ""})) == {}
    assert "squashfuse (mounts an image)" in gaps(
        node(pyxis={**known, "squashfuse": True}, programs={"squashfuse": ""})
    )
    small = [{**place, "free": 10 * GB} for place in FOLDERS]
    row = one("ENROOT_DATA_PATH", node(pyxis=known, enroot={"folders": small}))
    assert not row.finding.ok and "10.0 GB free" in row.finding.detail
    assert one("ENROOT_DATA_PATH", node(enroot={"folders": small})).finding.ok


def test_pyxis_without_enroot_or_refused_by_slurm() -> None:
    known = node(pyxis={"known": True}, enroot={"path": ""})
    assert "enroot, which is not there" in gaps(known)["pyxis"].finding.detail
    refused = node(pyxis={"plugin": "/x.so", "fault": "Incompatible plugin version"})
    assert "/x.so is in plugstack.conf" in gaps(refused)["pyxis"].finding.detail
    assert "Incompatible plugin version" in gaps(refused)["pyxis"].finding.detail


def test_the_runtime_of_the_image_takes_newer_tools() -> None:
    bare: dict[str, Any] = {"enroot": {"path": ""}}
    old = gaps(node(python="3.6.8", programs={"unsquashfs": "4.4", "squashfuse": "/x"}, **bare))
    assert sorted(old) == ["python3", "unsquashfs (reads an image)"]
    assert "fuse-overlayfs (before Linux 6.6)" in gaps(node(kernel="5.15.0-x", **bare))
    gpus = gaps(node(nvidia={"cards": 8, "devices": 8}, **bare))
    assert list(gpus) == ["nvidia-container-cli (gives GPUs to a container)"]
    assert gaps(node(python="3.6.8", programs={"unsquashfs": "4.4"})) == {}  # enroot needs neither
    root = node(
        uid=0,
        fuse={"open": False},
        programs={"squashfuse": "", "kernel_squashfs": True},
        namespaces={"works": False},
        **bare,
    )
    assert gaps(root) == {}


def place(**changed: Any) -> dict[str, Any]:
    return {**FOLDERS[0], **changed}


def test_a_folder_that_enroot_cannot_make() -> None:
    closed = place(path="/run/enroot", there=False, above="/run", usable=False)
    row = gaps(node(enroot={"folders": [closed]}))["ENROOT_RUNTIME_PATH"]
    assert row.finding.detail == "/run/enroot cannot be made: /run is not writable for uid 1000"
    assert "/run/enroot/user-$(id -u)" in row.finding.fix and "tmpfiles.d" in row.finding.fix
    temporary = place(name="ENROOT_TEMP_PATH", usable=False)  # only an import needs it
    assert gaps(node(enroot={"folders": [temporary]})) == {}


def test_folders_with_the_node_s_name_in_them_are_alike() -> None:
    nodes = [
        node(name, enroot={"folders": [place(path=f"/data/rt-{name}-7", free=count * GB)]})
        for count, name in enumerate(("n1", "n2"), 3)
    ]
    row = one("ENROOT_RUNTIME_PATH", *nodes)
    assert row.finding.detail == "/data/rt-NODE-7, on tmpfs, at least 3.0 GB free"


def test_room_is_reported_once_for_all_nodes_by_the_least() -> None:
    tight = node("n2", enroot={"folders": [place(name="ENROOT_DATA_PATH", free=3 * GB)]})
    wide = node("n1", enroot={"folders": [place(name="ENROOT_DATA_PATH", free=9 * GB)]})
    row = one("ENROOT_DATA_PATH", wide, tight)
    assert row.finding.detail == "/run/RUNTIME, on tmpfs, at least 3.0 GB free"
    full = node("n3", enroot={"folders": [place(name="ENROOT_DATA_PATH", free=GB // 2)]})
    assert [row.nodes for row in several("ENROOT_DATA_PATH", wide, full)] == [("n1",), ("n3",)]


def test_an_image_is_held_against_the_one_here_else_against_that_of_most() -> None:
    nobody = replace(ASKED, head=None)
    other = node("n3", image={"size": 7, "read": 7, "digest": "c"})
    assert gaps(node("n1"), node("n2"), other, asked=nobody)[f"image {IMAGE}"].nodes == ("n3",)
    slow = node("n2", image={"read": 1 << 20, "digest": "part", "seconds": 40.0})
    assert gaps(node("n1"), slow) == {}  # if only a part was read, only the size can be compared
    unasked = replace(ASKED, image=None, head=None)
    assert several("image", node(), asked=unasked) == []


def off(clocks: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Return the nodes whose clocks are wrong, with the message for each."""
    nodes = [node(name) for name in clocks if name != HERE]
    found = rows(nodes, ASKED, clocks)
    wrong = [row for row in found if row.finding.what == "clock" and not row.finding.ok]
    return {folded(row.nodes): row.finding.detail for row in wrong}


def test_a_clock_is_off_only_where_it_must_be() -> None:
    assert off({"n1": (-0.1, 0.1), "n2": (-300.0, 0.2)}) == {}  # its answer took long
    assert off({"n1": CLOSE, "n2": (89.9, 90.4)}) == {"n2": "1 min 30 s ahead of the others"}
    assert off({"n1": CLOSE, "n2": (-20.5, -20.1)}) == {"n2": "20.1 s behind the others"}
    everybody = {f"n{number}": (-90.2, -90.0) for number in range(1, 4)}
    assert off(everybody) == {HERE: "1 min 30 s ahead of the others"}
    (row,) = [row for row in rows([node()], ASKED, {}) if row.finding.what == "clock"]
    assert row.finding.detail == "not known" and not row.finding.needed


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["n1"], "n1"),
        (["n1", "n2", "n4"], "n[1-2,4]"),
        (["a09", "a10", "a11"], "a[09-11]"),
        (["n9", "n10", "head"], "n[9-10],head"),
        (["q-st-p5-1", "q-dy-g6-1"], "q-st-p5-1,q-dy-g6-1"),
        (["b", "a", "b"], "b,a"),
        ([], ""),
    ],
)
def test_names_are_shown_as_slurm_does(names: list[str], shown: str) -> None:
    assert folded(names) == shown


@pytest.mark.parametrize(
    "shown",
    [
        None,
        [1],
        {"python": 3, "uid": "x", "fuse": [], "enroot": {"folders": [{"free": "much"}, 7]}},
        {"memlock": 10**400, "image": {"seconds": float("nan"), "size": -(10**30)}},
        {"python": "3.11.2", "markers": {"digest": "a1"}, "faults": "none", "nvidia": None},
    ],
)
def test_what_is_no_answer_ends_in_rows_not_in_a_traceback(shown: object) -> None:
    strange = facts.node(shown, "n2")
    assert isinstance(strange, Node)
    for row in judged(node("n1"), strange):
        assert row.lines(8)


def test_texts_of_nodes_are_bounded() -> None:
    shown = {"python": "3" * 10**6, "markers": [{}] * 10**4}
    found = facts.node(shown, "n1")
    assert len(found.python) == facts.LONGEST and len(found.markers) == facts.MOST
    assert found.markers[0] == Marker() and found.enroot.folders == () == Node().enroot.folders
    assert facts.node({"enroot": {"folders": [{"free": True}]}}, "n").enroot.folders == (Place(),)


def test_every_row_says_what_mends_it() -> None:
    bad = facts.node({"python": "3.6", "nvidia": {"cards": 1}, "efa": {"cards": 1}}, "n2")
    for row in judged(node("n1"), bad):
        assert row.finding.ok or row.finding.fix
    assert cluster_findings.ORDER[0] == "pyxis"
