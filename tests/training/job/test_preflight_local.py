"""What a node finds about itself: drivers' programs are stand-ins, /sys and /dev are made up."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.run_folders import plan
from training.job.plan import Job
from training.job.preflight import checks_accelerator, checks_local, checks_network, workers
from training.job.preflight.checks_accelerator import check_chips, check_gpus, has_gpus
from training.job.preflight.checks_network import BadNodes, SharedFolder, check_efa
from training.job.preflight.finding import run_check
from training.job.preflight.workers import Workers

GPU = """\
<gpu id="00000000:{bus}:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <uuid>GPU-{bus}aaaaaa-0000</uuid>
  <gpu_recovery_action>{action}</gpu_recovery_action>
  <ecc_errors>
    <volatile>
      <sram_correctable>7</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
      <dram_correctable>3</dram_correctable>
      <dram_uncorrectable>{errors}</dram_uncorrectable>
    </volatile>
    <aggregate>
      <dram_uncorrectable>9</dram_uncorrectable>
      <sram_threshold_exceeded>No</sram_threshold_exceeded>
    </aggregate>
  </ecc_errors>
  <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
  <remapped_rows>
    <remapped_row_corr>1</remapped_row_corr>
    <remapped_row_unc>0</remapped_row_unc>
    <remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>{failure}</remapped_row_failure>
  </remapped_rows>
</gpu>
"""
WELL = {"action": "None", "errors": "0", "pending": "No", "failure": "No"}


def gpus(*changes: dict[str, str]) -> str:
    """Return what nvidia-smi -q -x prints for one GPU per argument, with these changes."""
    each = [GPU.format(**{**WELL, **one, "bus": f"5{i}"}) for i, one in enumerate(changes)]
    return f'<?xml version="1.0" ?>\n<nvidia_smi_log>\n{"".join(each)}</nvidia_smi_log>\n'


def stand_in(place: Path, name: str, script: str) -> dict[str, str]:
    """Put a program on its own PATH; returns the environment for it."""
    (place / "bin").mkdir(exist_ok=True)
    program = place / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{place}/bin:{os.environ['PATH']}"}


def smi(place: Path, document: str) -> dict[str, str]:
    (place / "smi.xml").write_text(document)
    return stand_in(place, "nvidia-smi", f'[ "$*" = "-q -x" ] && cat {place}/smi.xml')


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"errors": "2"}, "2 memory errors that ECC could not correct (dram_uncorrectable)"),
        ({"pending": "Yes"}, "memory rows wait for a reset to be remapped"),
        ({"failure": "Yes"}, "memory rows could not be remapped"),
        ({"action": "Reset"}, "the driver asks for its recovery: Reset"),
    ],
)
def test_an_ill_gpu_is_named(tmp_path: Path, change: dict[str, str], shown: str) -> None:
    environment = smi(tmp_path, gpus({}, change))
    assert check_gpus(environment) == (
        "2 GPUs asked",
        [f"GPU 1 (GPU-51aaaaaa-0000): {shown}"],
    )
    # A GPU that this job does not use does not matter.
    for others in ("0", "GPU-50aaaa"):
        assert check_gpus({**environment, "CUDA_VISIBLE_DEVICES": others})[1] == []
    assert len(check_gpus({**environment, "CUDA_VISIBLE_DEVICES": "0,1"})[1]) == 1
    # CUDA sees only those before the first invalid one.
    assert check_gpus({**environment, "CUDA_VISIBLE_DEVICES": "0,-1,1"}) == ("1 GPUs asked", [])


def test_gpus_that_are_hidden_are_not_asked(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    for hidden in ("", "-1", "NoDevFiles"):
        assert not has_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": hidden})
    for chosen in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "MIG-1,-1"}):
        assert has_gpus(tmp_path, chosen)


@pytest.mark.processes
def test_gpus_that_are_well(tmp_path: Path) -> None:
    lacking = {"errors": "N/A", "action": "N/A", "pending": "N/A", "failure": "[N/A]"}
    assert check_gpus(smi(tmp_path, gpus({}, lacking))) == ("2 GPUs asked", [])


@pytest.mark.processes
def test_a_gpu_of_the_time_before_rows_were_remapped(tmp_path: Path) -> None:
    old = (
        "<nvidia_smi_log><gpu><uuid>GPU-1</uuid><ecc_errors><volatile>"
        "<single_bit><total>5</total></single_bit><double_bit><total>1</total></double_bit>"
        "</volatile></ecc_errors><retired_pages><pending_retirement>Yes</pending_retirement>"
        "</retired_pages></gpu></nvidia_smi_log>"
    )
    assert check_gpus(smi(tmp_path, old))[1] == [
        "GPU 0 (GPU-1): 1 memory errors that ECC could not correct (double_bit)",
        "GPU 0 (GPU-1): memory pages wait for a reset to be retired",
    ]


@pytest.mark.processes
def test_a_driver_that_has_lost_a_gpu(tmp_path: Path) -> None:
    said = "Unable to determine the device handle for GPU 0000:53:00.0: Unknown Error"
    environment = stand_in(tmp_path, "nvidia-smi", f'echo "{said}"; exit 15')
    assert check_gpus(environment)[1] == [f"nvidia-smi ends with exit code 15 and says: {said}"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "smi_timeout", "faults"),
    [
        ("sleep 2; cat {}/smi.xml", 60, ()),
        ("exec sleep 600", 1, ("nvidia-smi gives no answer within 1 s",)),
    ],
)
def test_a_driver_has_longer_than_a_file_system(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    smi_timeout: int,
    faults: tuple[str, ...],
) -> None:
    """It may have to start each GPU first."""
    monkeypatch.setattr(checks_local, "TIMEOUT", 1)
    monkeypatch.setattr(checks_accelerator, "SMI_TIMEOUT", smi_timeout)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "smi.xml").write_text(gpus({}))
    environment = stand_in(tmp_path, "nvidia-smi", script.format(tmp_path))
    workers: Any = SimpleNamespace(size=1, ask=lambda orders, seconds: [{}])
    report = checks_local.check_node(
        plan(tmp_path), environment, workers, None, "nonce", 120.0, tmp_path
    )
    [driver] = [one for one in report.findings if one.check == "driver"]
    assert driver.faults == faults


def efa_node(place: Path, *cards: str) -> Path:
    """Make a /sys and a /dev with EFA cards."""
    root = place / "root"
    for number, card in enumerate(cards):
        device = root / "sys/class/infiniband" / card
        (device / f"device/infiniband_verbs/uverbs{number}").mkdir(parents=True)
        (device / "device/vendor").write_text("0x1d0f\n")
        (device / "ports/1").mkdir(parents=True)
        (device / "ports/1/state").write_text("4: ACTIVE\n")
        (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (root / f"dev/infiniband/uverbs{number}").touch()
    return root


FI_INFO = """\
[ "$*" = "-p efa" ] || exit 1
for name in {names}; do
echo "provider: efa
    fabric: efa
    domain: $name-rdm
    version: 122.0
    type: FI_EP_RDM
provider: efa
    fabric: efa
    domain: $name-dgrm"
done"""


@pytest.mark.processes
def test_efa(tmp_path: Path) -> None:
    root = efa_node(tmp_path, "rdmap16s27", "rdmap32s27")
    environment = stand_in(tmp_path, "fi_info", FI_INFO.format(names="rdmap16s27 rdmap32s27"))
    assert check_efa(root, environment) == ("2 EFA cards", [])
    (root / "dev/infiniband/uverbs1").unlink()
    (root / "sys/class/infiniband/rdmap16s27/ports/1/state").write_text("1: DOWN\n")
    stand_in(tmp_path, "fi_info", FI_INFO.format(names="rdmap16s27"))
    assert check_efa(root, environment)[1] == [
        "the port of rdmap16s27 is not active: 1: DOWN",
        "rdmap32s27: there is no /dev/infiniband/uverbs1 in the container",
        "libfabric's provider does not have rdmap32s27",
    ]


@pytest.mark.processes
def test_efa_provider_that_does_not_load(tmp_path: Path) -> None:
    root = efa_node(tmp_path, "efa_0")
    environment = stand_in(tmp_path, "fi_info", "echo fi_getinfo: -61 >&2; exit 61")
    assert check_efa(root, environment)[1] == [
        "libfabric's provider does not load: fi_info -p efa: fi_getinfo: -61"
    ]
    assert check_efa(tmp_path, environment) == ("no EFA here", [])


@pytest.mark.processes
def test_neuron(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/neuron{number}").touch()
    seen = [{"neuron_device": number, "nc_count": 2} for number in range(2)]
    environment = stand_in(tmp_path, "neuron-ls", f"echo '{json.dumps(seen)}'")
    assert check_chips(tmp_path, environment, 4) == (
        "2 Neuron chips, 4 cores",
        [],
    )
    counts = tmp_path / "sys/devices/virtual/neuron_device/neuron1/stats/hardware"
    (counts / "mem_ecc_uncorrected").mkdir(parents=True)
    (counts / "mem_ecc_uncorrected/total").write_text("3\n")
    stand_in(tmp_path, "neuron-ls", f"echo '{json.dumps(seen[:1])}'")
    assert check_chips(tmp_path, environment, 4)[1] == [
        "neuron1: 3 memory errors not corrected (mem_ecc_uncorrected)",
        "neuron-ls sees 1 chips, /dev has 2",
        "2 cores for 4 processes",
    ]


def test_a_folder_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    environment = {"TMPDIR": str(tmp_path)}
    assert checks_local.check_space(tmp_path, environment)[1] == []
    monkeypatch.setitem(checks_local.LEAST_FREE, "temporary", 1 << 60)
    (fault,) = checks_local.check_space(tmp_path, environment)[1]
    assert fault.startswith(f"{tmp_path} has ") and "less than 1073741824.0 GiB" in fault


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    shared = SharedFolder(tmp_path / "fsx", Job(id="7"))
    found = run_check("folder", lambda: shared.write("nonce"))
    assert found.faults == (f"{tmp_path}/fsx/.preflight.7.0: No such file or directory",)


def test_files_of_an_earlier_meeting_are_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_network, "SEEN_WITHIN", 0.3)
    first, second = (
        SharedFolder(tmp_path, Job(id="7", nodes=2, node_rank=rank)) for rank in (0, 1)
    )
    first.write("old")
    second.write("new")
    assert second.unseen("new", [1]) == []
    assert second.unseen("new", [0]) == [0]


def test_what_hangs_is_a_fault() -> None:
    def hang() -> tuple[str, list[str]]:
        time.sleep(30)
        return "", []

    assert run_check("folder", hang, 0.2).faults == ("no answer within 0 s",)


def test_bad_nodes_are_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    own = BadNodes(tmp_path, Job(id="7"))
    other = BadNodes(tmp_path, Job(id="7"))
    own.write(["gpu-1", "gpu-2"])
    assert other.is_news() and own.path == tmp_path / "bad-nodes.7.0"
    assert own.path.read_text() == "gpu-1\ngpu-2\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bad-nodes.7.0"]
    own.write([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_versions_name_the_image_and_the_drivers(tmp_path: Path) -> None:
    (tmp_path / "sqshforge/meta").mkdir(parents=True)
    (tmp_path / "sqshforge/meta/lock.json").write_text("{}")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("550.127.05\n")
    environment = stand_in(tmp_path, "fi_info", "echo 'fi_info: 1.22.0\nlibfabric: 1.22.0amzn4.0'")
    found = checks_local.read_versions(tmp_path, environment, {"torch": "2.2.2"})
    assert found["nvidia driver"] == "550.127.05"
    assert found["libfabric"] == "1.22.0amzn4.0"
    assert (found["torch"], found["nccl"]) == ("2.2.2", "none")
    assert found["image"] == "44136fa355b3"  # SHA-256 of {}
    assert len(found["training"]) == 12


@pytest.mark.processes
def test_workers_outlive_one_that_hangs() -> None:
    with Workers(1, {**os.environ, "OMP_NUM_THREADS": "1"}) as processes:
        assert processes.ask([{"do": "ready"}], 60) == [{}]
        alone = {"do": "reduce", "name": "x", "rank": 0, "world": 2, "seconds": 60}
        (answer,) = processes.ask([{**alone, "store": ["127.0.0.1", 9]}], 1)
        assert answer["fault"].startswith("no answer within 1 s")
        (answer,) = processes.ask([{"do": "probe"}], 60)
        assert answer["accelerator"] == "cpu" and "fault" not in answer


@pytest.mark.processes
def test_the_last_word_of_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import sys; print('the driver is gone', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(workers, "PROGRAM", ("-c", dying))
    with Workers(2, os.environ) as processes:
        for answer in processes.ask([{"do": "probe"}] * 2, 60):
            assert answer["fault"] == "ended by exit code 3: the driver is gone"
