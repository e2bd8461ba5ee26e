"""What a node is recognized as: instance types, plain machines, and deviations from the table.

The nodes are folders that look like their /dev, /sys, /proc and /opt (see instance_trees).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import instance_trees
from tests.support.instance_trees import SLURM
from training.errors import RequestError
from training.job.machine.instances import TYPES, instance_type
from training.job.machine.ulimits import Limit

P5 = TYPES["p5.48xlarge"]
TRN1, TRN2 = TYPES["trn1.32xlarge"], TYPES["trn2.48xlarge"]


@dataclass
class Machine:
    """A node of some kind, and what is decided on it."""

    root: Path

    def shown(self, cores: int = 192, /, **environment: str) -> str:
        return instance_trees.printed(self.root, cores, environment)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "root" / "dev").mkdir(parents=True)
    return Machine(tmp_path / "root")


@pytest.fixture
def p5(tmp_path: Path) -> Machine:
    instance_trees.instance(tmp_path / "p5", P5)
    return Machine(tmp_path / "p5")


def line(shown: str, name: str) -> str:
    """Return the rest of the block's line with a name; empty if there is none."""
    found = re.search(rf"^  {name} +(.*)$", shown, re.MULTILINE)
    return re.sub(" +", " ", found[1]) if found else ""


@pytest.mark.parametrize("type", TYPES)
def test_every_instance_type(type: str, tmp_path: Path) -> None:
    golden = instance_trees.GOLDEN / f"{type}.txt"
    assert instance_trees.golden(tmp_path / "root", TYPES[type]) == golden.read_text(), (
        "if this is meant: python -m tests.support.instance_trees, "
        f"and read git diff {golden.parent}"
    )


@pytest.mark.processes
def test_by_command_line() -> None:
    """Any machine can print the decisions for a type."""
    done = subprocess.run(
        [sys.executable, "-m", "training.launch", "--print-env", "--"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ".")}
        | {"INSTANCE_TYPE": "p4d.24xlarge"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert line(done.stdout, "instance") == "p4d.24xlarge from the environment"
    assert line(done.stdout, "NPROC_PER_NODE") == "8 8 x A100"
    assert "WARNING: node 0: none of the 8 x A100 of a p4d.24xlarge is seen here" in done.stdout


def test_a_plain_machine(machine: Machine) -> None:
    instance_trees.dmi(machine.root, "Dell Inc.", "PowerEdge XE9680")
    shown = machine.shown(4)
    assert line(shown, "instance") == "none of EC2's its firmware is not EC2's"
    assert line(shown, "NPROC_PER_NODE") == "1 no GPU"
    assert not re.search("EFA|FI_|NCCL_|NEURON_|NUMA_|WARNING", shown)


def test_gpus_of_a_plain_machine(machine: Machine) -> None:
    for number in range(4):
        instance_trees.gpu(machine.root, number, 0)
    shown = machine.shown()
    assert line(shown, "NPROC_PER_NODE") == "4 4 GPUs" and "WARNING" not in shown


def test_a_type_of_the_future(machine: Machine) -> None:
    instance_trees.dmi(machine.root, "Amazon EC2", "p9.96xlarge")
    for number in range(16):
        instance_trees.gpu(machine.root, number, 0)
        instance_trees.card(machine.root, number)
    shown = machine.shown(**SLURM)
    assert line(shown, "instance").endswith("(DMI); not in the table: what is seen counts")
    assert line(shown, "EFA") == "16 cards as seen"
    assert line(shown, "NPROC_PER_NODE") == "16 16 GPUs"
    assert line(shown, "FI_EFA_USE_HUGE_PAGE").startswith("0 ") and "WARNING" not in shown


def test_neuron_of_the_future(machine: Machine) -> None:
    instance_trees.dmi(machine.root, "Amazon EC2", "trn9.48xlarge")
    for number in range(2):
        instance_trees.chip(machine.root, number, 0, 8)
    assert (
        line(machine.shown(), "NPROC_PER_NODE") == "8 2 x Neuron, 4 cores each of 2 physical ones"
    )


# Deviations from the table.


def test_a_gpu_that_has_fallen_off(p5: Machine) -> None:
    (p5.root / "dev/nvidia5").unlink()
    shown = p5.shown(**SLURM)
    assert "WARNING: node 0: of the 8 x H100 of a p5.48xlarge /dev shows 7: that many" in shown
    assert line(shown, "NPROC_PER_NODE").startswith("7 ")
    # With a GPU missing, CUDA's numbers are not known.
    assert line(shown, "NUMA_BIND").startswith("0 ")


@pytest.mark.parametrize(
    "chosen", [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"NVIDIA_VISIBLE_DEVICES": "0,1"}]
)
def test_fewer_on_purpose(p5: Machine, chosen: dict[str, str]) -> None:
    for number in range(2, 8):
        (p5.root / f"dev/nvidia{number}").unlink()
    shown = p5.shown(**chosen)
    assert line(shown, "NPROC_PER_NODE").startswith("2 ") and "WARNING" not in shown


def test_more_named_than_there_are(p5: Machine) -> None:
    (p5.root / "dev/nvidia5").unlink()
    shown = p5.shown(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert "WARNING: node 0: CUDA_VISIBLE_DEVICES names 8 GPUs, but /dev shows 7" in shown


def test_network_cards_that_are_missing(p5: Machine) -> None:
    for number in range(3):
        (p5.root / f"sys/class/infiniband/rdmap{number}s0/device/vendor").write_text("0x15b3\n")
    shown = p5.shown()
    assert line(shown, "EFA").startswith("29 cards ")
    assert "WARNING: node 0: of the 32 EFA cards of a p5.48xlarge, 29 are seen" in shown


def test_no_driver_of_network_cards(machine: Machine) -> None:
    instance_trees.dmi(machine.root, "Amazon EC2", "g6.8xlarge")
    instance_trees.gpu(machine.root, 0, 0)
    shown = machine.shown()
    assert line(shown, "EFA").startswith("1 card ")
    assert "/sys/class/infiniband does not exist: 1 EFA card of a g6.8xlarge is taken for" in shown


def test_cards_are_known_by_their_driver(machine: Machine) -> None:
    device = machine.root / "sys/class/infiniband/rdmap0s0/device"
    driver = machine.root / "sys/bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    device.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    assert line(machine.shown(), "EFA") == "1 card as seen"


def test_warnings_come_from_every_node(p5: Machine) -> None:
    (p5.root / "dev/nvidia5").unlink()
    shown = p5.shown(**{**SLURM, "SLURM_NODEID": "1"})
    assert "WARNING: node 1: of the 8 x H100" in shown


# The cores of processes.


def test_named_gpus_take_their_own_cores(p5: Machine) -> None:
    """GPUs 6 and 1, on the second NUMA node and the first."""
    by_number = line(p5.shown(CUDA_VISIBLE_DEVICES="6,1"), "NUMA_BIND")
    by_name = line(p5.shown(CUDA_VISIBLE_DEVICES="GPU-6a,GPU-1a6b"), "NUMA_BIND")
    assert by_number == by_name
    assert by_number.endswith(": 48-95,144-191 0-47,96-143")


def test_gpus_without_their_drivers_files(machine: Machine) -> None:
    """PCI then tells which they are."""
    instance_trees.processors(machine.root, 8, 2)
    for number, numa in enumerate((1, 0)):
        instance_trees.gpu(machine.root, number, numa, driver=False)
    assert line(machine.shown(8), "NUMA_BIND").endswith(": 2-3,6-7 0-1,4-5")


def test_only_cores_that_the_task_has(p5: Machine) -> None:
    shown = line(p5.shown(60), "NUMA_BIND")
    assert shown.startswith("1 ") and shown.endswith("48-50 51-53 54-56 57-59")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"NUMA_BIND": "0"}, "0 from the environment"),
        ({"NPROC_PER_NODE": "9"}, "0 it is not known"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, "0 it is not known"),
    ],
)
def test_cores_are_left_alone(p5: Machine, environment: dict[str, str], shown: str) -> None:
    block = p5.shown(**environment)
    assert line(block, "NUMA_BIND").startswith(shown) and " training.job.rank " not in block


def test_fewer_processes_than_gpus(p5: Machine) -> None:
    """They use the first GPUs, each with all of its NUMA node's cores that are its own."""
    shown = line(p5.shown(NPROC_PER_NODE="2"), "NUMA_BIND")
    assert shown.endswith(": 0-23,96-119 24-47,120-143")


LS = """\
#!/bin/bash
[[ $* == --json-output ]] || exit 1
echo '[{"neuron_device": 0, "bdf": "cc:00.0"}, {"neuron_device": 1, "bdf": "0000:10:1c.0"}]'
"""


@pytest.mark.processes
def test_neuron_ls_tells_where_chips_are(machine: Machine) -> None:
    """Its order differs from PCI's."""
    instance_trees.processors(machine.root, 8, 2)
    for number, place, numa in ((0, "0000:cc:00.0", "1"), (1, "0000:10:1c.0", "0")):
        instance_trees.write(machine.root / f"dev/neuron{number}")
        instance_trees.write(machine.root / f"sys/bus/pci/devices/{place}/numa_node", numa)
    programs = machine.root / "bin"
    instance_trees.write(programs / "neuron-ls", LS)
    (programs / "neuron-ls").chmod(0o755)
    shown = machine.shown(8, PATH=f"{programs}:/usr/bin:/bin")
    assert line(shown, "NUMA_BIND").endswith(": 2,6 3,7 0,4 1,5")
    assert line(machine.shown(8), "NUMA_BIND").startswith("0 it is not known")


# Cores of Neuron.


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, "64"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "128"),
        ({"NEURON_RT_VISIBLE_CORES": "0-3,8"}, "5"),
    ],
)
def test_cores_of_trn2(tmp_path: Path, environment: dict[str, str], processes: str) -> None:
    instance_trees.instance(tmp_path / "trn2", TRN2)
    shown = instance_trees.printed(tmp_path / "trn2", 192, environment)
    assert line(shown, "NPROC_PER_NODE").startswith(f"{processes} ")
    chosen = "NEURON_RT_VISIBLE_CORES" in environment
    assert line(shown, "NEURON_RT_NUM_CORES") == ("" if chosen else f"{processes} a core a process")


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("--compile_cache=/a",), {}),
        (("--compile_cache", "/a"), {}),
        ((), {"NEURON_CC_FLAGS": "--cache_dir=/a"}),
        ((), {"CHECKPOINTS": ""}),
    ],
)
def test_a_compile_cache_of_ones_own(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    instance_trees.instance(tmp_path / "trn1", TRN1)
    shown = instance_trees.printed(tmp_path / "trn1", 128, SLURM | environment, ["--", *words])
    assert line(shown, "NEURON_COMPILE_CACHE_URL") == ""


# Locked memory.


def test_memory_that_cannot_be_locked(p5: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    few = (Limit("memlock", 65536, 8 * 2**20), Limit("nofile", 1024, 4096))
    monkeypatch.setattr(instance_trees, "LIMITS", few)
    shown = p5.shown()
    assert "WARNING: node 0: memlock: 8192 KiB can be locked in memory, but EFA needs" in shown
    assert line(shown, "limits").endswith("memlock 8192 KiB, nofile 4096; memlock, nofile raised")


def test_memory_need_not_be_locked_without_efa(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_trees, "LIMITS", (Limit("memlock", 65536, 65536),))
    shown = machine.shown()
    assert "limits" not in shown and "WARNING" not in shown


# Wrong requests.


@pytest.mark.parametrize(
    "environment",
    [
        {"INSTANCE_TYPE": "p5"},
        {"NUMA_BIND": "yes"},
        {"NEURON_LOGICAL_NC_CONFIG": "4"},
        {"NEURON_RT_VISIBLE_CORES": "all"},
        {"NSYS": "yes"},
        {"NSYS": "1", "NSYS_RANKS": "first"},
        {"NSYS": "1", "NSYS_RANKS": "0,99", "NSYS_PATH": "/bin/true"},
        {"NSYS": "1", "NSYS_DELAY": "soon", "NSYS_PATH": "/bin/true"},
        {"NSYS": "1", "NSYS_PATH": "/no/such/program"},
        {"NSYS": "1"},
    ],
)
def test_what_cannot_be(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    instance_trees.instance(tmp_path / "trn1", TRN1)
    with pytest.raises(AssertionError):  # the exit code's
        instance_trees.printed(tmp_path / "trn1", 128, environment)
    name = list(environment)[1 if len(environment) > 1 else 0]
    assert re.match(f"error: {name}(:|=1:) .+", capsys.readouterr().err)


def test_the_type_is_checked_by_its_form() -> None:
    with pytest.raises(RequestError, match="INSTANCE_TYPE: must be a type such as"):
        instance_type(Path("/"), {"INSTANCE_TYPE": "big one"})
