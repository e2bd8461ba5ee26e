"""The variables of the network: which versions of the libraries want which."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support import instance_trees
from tests.support.instance_trees import CURRENT, SLURM
from training.job.machine.instances import TYPES, Instance

NCCL = {"LD_PRELOAD": "/opt/nccl/lib/libnccl.so.2"}
NETWORK = re.compile(r"^  ((?:NCCL|FI)_\w+) +(\S+) ", re.MULTILINE)
ALWAYS = {"NCCL_SOCKET_IFNAME": "^docker,lo,veth", "FI_EFA_USE_HUGE_PAGE": "0"}
OLDEST = {"NCCL_PROTO": "simple", "FI_PROVIDER": "efa"}
RDMA = {"FI_EFA_USE_DEVICE_RDMA": "1"}
TUNER = {"NCCL_TUNER_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-ofi-tuner.so"}


def node(root: Path, what: Instance, versions: dict[str, str]) -> None:
    """Make a node with software other than the current."""
    instance_trees.instance(root, what)
    shutil.rmtree(root / "opt")
    instance_trees.software(root, **(CURRENT | versions))


def network(root: Path, **environment: str) -> dict[str, str]:
    shown = instance_trees.printed(root, 192, {**SLURM, **NCCL, **environment})
    return dict(NETWORK.findall(shown))


@pytest.mark.parametrize(
    ("type", "versions", "more"),
    [
        ("p5.48xlarge", {}, {}),
        ("p4d.24xlarge", {"plugin": "1.5.0-aws"}, OLDEST | RDMA),
        ("g5.48xlarge", {"plugin": "1.5.0-aws"}, OLDEST),
        ("p4d.24xlarge", {"plugin": "1.6.0"}, RDMA),
        ("g6e.48xlarge", {"plugin": "1.6.0"}, {}),
        ("p4de.24xlarge", {"libfabric": "1.17.1"}, RDMA),
        ("p4d.24xlarge", {"libfabric": "1.18.0", "plugin": "1.7.0"}, {}),
        ("p5.48xlarge", {"installer": "1.29.0"}, {"FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}),
        ("p5.48xlarge", {"installer": "1.29.1"}, {}),
        ("p5en.48xlarge", {"plugin": "1.15.0-aws"}, TUNER),
        ("p4d.24xlarge", {"plugin": "1.15.0-aws"}, {}),  # the tuner does not know it
    ],
)
def test_versions(
    type: str, versions: dict[str, str], more: dict[str, str], tmp_path: Path
) -> None:
    node(tmp_path / "root", TYPES[type], versions)
    assert network(tmp_path / "root") == ALWAYS | more


def test_libraries_that_nobody_knows(tmp_path: Path) -> None:
    """They are assumed to be current."""
    node(tmp_path / "root", TYPES["p5.48xlarge"], {"plugin": "git-6e504db"})
    (tmp_path / "root/opt/amazon/efa_installed_packages").unlink()
    shutil.rmtree(tmp_path / "root/opt/amazon/efa")
    assert network(tmp_path / "root") == ALWAYS


def test_an_old_nccl(tmp_path: Path) -> None:
    """2.20 cannot use the tuner well; 2.18 does not conflict with the old installer."""
    root = tmp_path / "root"
    node(root, TYPES["p5.48xlarge"], {"plugin": "1.9.1-aws", "installer": "1.29.0"})
    for old in ("2.20.3", "2.18.5"):
        instance_trees.write(root / f"opt/old/libnccl.so.{old}")
    memops = {"FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}
    assert network(root, LD_PRELOAD="/opt/old/libnccl.so.2.20.3") == ALWAYS | memops
    assert network(root, LD_PRELOAD="/opt/old/libnccl.so.2.18.5") == ALWAYS


def test_the_images_own_record(tmp_path: Path) -> None:
    """It is used for a plugin whose library does not contain its version."""
    root = tmp_path / "root"
    node(root, TYPES["p4d.24xlarge"], {"plugin": "?"})
    source = '{"name": "aws-ofi-nccl", "ref": "v1.6.0-aws"}'
    instance_trees.write(root / "sqshforge/meta/lock.json", f'{{"sources": [{source}]}}')
    assert network(root) == ALWAYS | RDMA


def test_the_plugin_where_the_path_of_libraries_has_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    node(root, TYPES["p4d.24xlarge"], {})
    instance_trees.write(root / "opt/own/libnccl-net.so", "Initializing aws-ofi-nccl 1.6.0")
    assert network(root, LD_LIBRARY_PATH="/no/such:/opt/own") == ALWAYS | RDMA


@pytest.mark.parametrize(
    ("type", "plugin", "first"),
    [
        ("p5e.48xlarge", "1.9.1-aws", "1.11.0"),
        ("p5en.48xlarge", "1.11.1-aws", "1.13.0"),
        ("p6-b200.48xlarge", "1.13.2-aws", "1.14.0"),
        ("p6-b300.48xlarge", "1.13.2-aws", "1.14.0"),
        ("g7e.48xlarge", "1.17.1", "1.17.2"),
    ],
)
def test_an_instance_that_the_plugin_does_not_know(
    type: str, plugin: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both versions and the fix are printed once; nothing from the first version that knows it."""
    root = tmp_path / "root"
    node(root, TYPES[type], {"plugin": plugin})
    shown = instance_trees.printed(root, 192, {**SLURM, **NCCL}) + capsys.readouterr().err
    warned = [line for line in shown.splitlines() if "WARNING" in line]
    assert len(warned) == 1
    assert plugin.removesuffix("-aws") in warned[0] and first in warned[0] and type in warned[0]
    assert "fix: " in warned[0]
    shutil.rmtree(root / "opt")
    instance_trees.software(root, **(CURRENT | {"plugin": first}))
    shown = instance_trees.printed(root, 192, {**SLURM, **NCCL}) + capsys.readouterr().err
    assert "WARNING" not in shown


@pytest.mark.parametrize(
    ("type", "plugin", "nodes"),
    [
        ("p5.48xlarge", "1.9.1-aws", "2"),  # which it knows
        ("p5e.48xlarge", "1.9.1-aws", "1"),  # a single node does not depend on the plugin
        ("p5e.48xlarge", "git-6e504db", "2"),  # assumed to be current
        ("g6.48xlarge", "1.9.1-aws", "2"),  # no version has anything for it
    ],
)
def test_no_warning_of_the_plugin(
    type: str, plugin: str, nodes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node(tmp_path / "root", TYPES[type], {"plugin": plugin})
    environment = {**SLURM, **NCCL, "SLURM_STEP_NUM_NODES": nodes}
    shown = instance_trees.printed(tmp_path / "root", 192, environment)
    assert "WARNING" not in shown + capsys.readouterr().err


FI_INFO = """\
#!/bin/bash
[[ $* == --version ]] && echo 'fi_info: 1.17.0amzn1.0
libfabric: 1.17.0amzn1.0
libfabric api: 1.17'
"""


@pytest.mark.processes
def test_fi_info_is_asked_last(tmp_path: Path) -> None:
    root = tmp_path / "root"
    node(root, TYPES["p4d.24xlarge"], {"installer": "1.25.0"})
    shutil.rmtree(root / "opt/amazon/efa")
    instance_trees.write(tmp_path / "bin/fi_info", FI_INFO)
    (tmp_path / "bin/fi_info").chmod(0o755)
    programs = f"{tmp_path}/bin:/usr/bin:/bin"
    assert "FI_EFA_USE_DEVICE_RDMA" not in network(root, PATH=programs)  # from the installer's list
    (root / "opt/amazon/efa_installed_packages").write_text("# EFA installer version: 1.25.0\n")
    assert network(root, PATH=programs)["FI_EFA_USE_DEVICE_RDMA"] == "1"


def test_what_is_set_wins_and_what_is_empty_is_not_there(tmp_path: Path) -> None:
    node(tmp_path / "root", TYPES["p5.48xlarge"], {})
    found = network(tmp_path / "root", NCCL_SOCKET_IFNAME="ens", FI_EFA_USE_HUGE_PAGE="")
    assert found == {"NCCL_SOCKET_IFNAME": "ens", "FI_EFA_USE_HUGE_PAGE": "0"}


def test_one_node_alone(tmp_path: Path) -> None:
    node(tmp_path / "root", TYPES["p5.48xlarge"], {"plugin": "1.15.0"})
    assert network(tmp_path / "root", SLURM_STEP_NUM_NODES="1") == {"FI_EFA_USE_HUGE_PAGE": "0"}


def test_what_aws_ofi_nccl_sets_is_never_set() -> None:
    names = {"NCCL_BUFFSIZE", "NCCL_MIN_CHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NVLS_CHUNKSIZE"}
    for golden in instance_trees.GOLDEN.glob("*.txt"):
        found = {name for name, _ in NETWORK.findall(golden.read_text())}
        assert not found & names and "RDMAV_" not in golden.read_text()


@pytest.mark.parametrize(("kernel", "safe"), [("5.10.226", {"FI_EFA_FORK_SAFE": "1"}), ("6.8", {})])
def test_neuron_on_kernels(kernel: str, safe: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "root"
    instance_trees.instance(root, TYPES["trn1.32xlarge"])
    instance_trees.write(root / "proc/sys/kernel/osrelease", kernel)
    asked = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
    assert network(root) == asked | RDMA | safe
    assert network(root, SLURM_STEP_NUM_NODES="1") == {"FI_EFA_USE_HUGE_PAGE": "0"}


def test_neuron_without_network_cards(tmp_path: Path) -> None:
    instance_trees.instance(tmp_path / "root", TYPES["trn1.2xlarge"])
    assert network(tmp_path / "root") == {}
