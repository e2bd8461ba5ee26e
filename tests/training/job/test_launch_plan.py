"""What a node decides by itself, and the block that prints it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.node_program import SLURM
from training.errors import RequestError
from training.job.machine.ulimits import Limit
from training.job.node import Accelerators, look_at_node
from training.job.plan import Node, Plan, make_plan, read_job

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"

PLAIN = Node(cores=2, address="127.0.0.1", interface="", type_why="it has no DMI")
CPU = Node(cores=64, address="10.0.0.7", interface="eth0", type_why="it has no DMI")
GPUS = Node(
    cores=192,
    address="10.0.0.9",
    interface="ens32",
    type_why="it has no DMI",
    accelerators=Accelerators(kind="cuda", seen=8),
)

OVERRIDES = {
    "NPROC_PER_NODE": "4",
    "OMP_NUM_THREADS": "3",
    "TRITON_CACHE_DIR": "/scratch/triton",
    "GLOO_SOCKET_IFNAME": "ib0",
    "MASTER_PORT": "29500",
}
FLAGS = ("--model_name=mamba-tiny", "--dataset_path=text:/usr/lib/python3.*/**/*.py")


def plan(environment: Mapping[str, str], node: Node) -> Plan:
    return make_plan(read_job(environment), node, environment, "training.mamba_fsdp", FLAGS)


@pytest.mark.parametrize(
    ("name", "environment", "node"),
    [
        ("alone", {}, PLAIN),
        ("cpu-node-1-of-2", SLURM, CPU),
        ("gpus-node-0-of-16", SLURM | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "16"}, GPUS),
        ("restarted", SLURM | {"SLURM_RESTART_COUNT": "2", "TMPDIR": "/local"}, CPU),
        ("overridden", SLURM | OVERRIDES, GPUS),
    ],
)
def test_block(name: str, environment: dict[str, str], node: Node) -> None:
    block = plan(environment, node).block() + "\n"
    assert block == (GOLDEN / f"{name}.txt").read_text()


def test_every_restart_meets_anew() -> None:
    first, second = (
        read_job(SLURM | {"SLURM_RESTART_COUNT": count}).run_id for count in ("0", "1")
    )
    assert first != second


def test_gloo_joins_few_of_many_ranks() -> None:
    many = SLURM | {"SLURM_STEP_NUM_NODES": "64"}
    names = [{one.name for one in plan(env, GPUS).variables} for env in (SLURM, many)]
    assert ["TORCH_GLOO_LAZY_INIT" in found for found in names] == [False, True]


@pytest.mark.parametrize(
    ("nodes", "given", "backend"),
    [(256, "", "c10d"), (257, "", "static"), (2, "static", "static"), (2000, "c10d", "c10d")],
)
def test_the_rendezvous_follows_from_the_number_of_nodes(
    nodes: int, given: str, backend: str
) -> None:
    asked = {"SLURM_STEP_NUM_NODES": str(nodes), "RENDEZVOUS": given, "RESTARTS": "3"}
    chosen = plan(SLURM | asked, CPU)
    assert f"--rdzv-backend={backend}" in chosen.torchrun
    assert f"--max-restarts={3 if backend == 'c10d' else 0}" in chosen.torchrun
    assert ("--node-rank=1" in chosen.torchrun) == (backend == "static")
    line = next(line for line in chosen.block().splitlines() if line.startswith("  rendezvous "))
    assert chosen.rendezvous.restarts_in_place == (backend == "c10d")
    once = "which restarts nothing in place"
    why = {256: "", 257: f"static, {once}, as 257 nodes are too many for c10d"}
    why |= {2: f"static from the environment, {once}"}
    why |= {2000: "c10d from the environment, though 2,000 nodes are too many for c10d"}
    assert line.endswith(f"hosted by node 0, as 4242.0{'; ' * bool(why[nodes])}{why[nodes]}")


def test_a_rendezvous_that_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match="RENDEZVOUS: must be c10d or static, not 'etcd'"):
        plan(SLURM | {"RENDEZVOUS": "etcd"}, CPU)
    with pytest.raises(RequestError, match=r"RENDEZVOUS: static needs a port .*MASTER_PORT"):
        plan({"RENDEZVOUS": "static"}, PLAIN)


def test_node_0_must_hold_a_connection_of_all() -> None:
    many = SLURM | {"SLURM_STEP_NUM_NODES": "600"}
    few = replace(GPUS, limits=(Limit("nofile", 1024, 4096),))
    assert plan(many, few).job.nodes == 600, "a node that hosts nothing"
    with pytest.raises(RequestError, match=r"4,096 files .* 600 nodes and 4,800 processes"):
        plan(many | {"SLURM_NODEID": "0"}, few)
    enough = replace(GPUS, limits=(Limit("nofile", 1024, 5400),))
    assert plan(many | {"SLURM_NODEID": "0"}, enough).job.nodes == 600


def test_one_step_of_a_larger_job() -> None:
    """`srun --nodes=1` in a job of two: the step's number of nodes counts."""
    assert read_job(SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}).nodes == 1


def test_empty_variables_are_not_there() -> None:
    """`enroot --env NAME` makes these of variables that the host does not have."""
    names = ("SLURM_RESTART_COUNT", "MASTER_PORT", "NPROC_PER_NODE", "OMP_NUM_THREADS", "TMPDIR")
    empty = SLURM | dict.fromkeys(names, "")
    job = read_job(empty)
    assert (job.restarts, job.port) == (0, 61000 + 4242)
    assert plan(empty, GPUS).block() == plan(SLURM, GPUS).block()


def test_the_port_of_neurons_runtime_stays_free() -> None:
    assert read_job(SLURM | {"SLURM_JOB_ID": str(4536 + 1182)}).port == 62183


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: must be"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: must be from 1 to 65535, not 99999"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: must be from 1 to 65535, not 0"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE: must be at least 1"),
        ({"NPROC_PER_NODE": "gpu"}, "NPROC_PER_NODE: must be a whole number"),
        ({"GPUS_PER_NODE": "gpu"}, "GPUS_PER_NODE: must be a whole number"),
        ({"NPROC_PER_NODE": "2", "GPUS_PER_NODE": "8"}, "fix: give one of them"),
        ({"NODES": "n1 n2 n3"}, "sees a job of 2 nodes, but its launcher has started 3"),
        ({"NODES": "n1 n2", "SLURM_JOB_ID": ""}, "sees a job of 1 node, but its launcher"),
        ({"SPARES": "one"}, "SPARES: must be a whole number"),
        ({"SPARES": "1"}, "SPARES: 1 of 2 nodes would wait.* fix: --nodes=3 or more"),
        ({"SPARES": "1", "SLURM_JOB_ID": ""}, "SPARES: 1 of 1 node would wait"),
        (
            {"SPARES": "1", "SLURM_STEP_NUM_NODES": "300"},
            "SPARES: nodes meet again by the rendezvous c10d, and this is static",
        ),
        ({"SHRINK": "yes"}, "SHRINK: must be 0 or 1, not 'yes'"),
        ({"SHRINK": "1", "SLURM_JOB_ID": ""}, "SHRINK: 1 node cannot become fewer.* fix: --nodes="),
        (
            {"SHRINK": "1", "RENDEZVOUS": "static"},
            "SHRINK: nodes meet again by .* leave SHRINK out",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, str], shown: str) -> None:
    with pytest.raises(RequestError, match=shown):
        plan(SLURM | change, CPU)


def test_the_nodes_of_the_launcher() -> None:
    assert read_job(SLURM | {"NODES": "n1 n2"}).nodes == 2
    assert read_job({"NODES": "n1"}).nodes == 1


def test_spares_are_nodes_that_do_not_train() -> None:
    """They are checked like the others, but torchrun waits only for the others."""
    chosen = plan(SLURM | {"SPARES": "2", "SLURM_STEP_NUM_NODES": "6"}, GPUS)
    assert (chosen.job.nodes, chosen.job.training) == (6, 4)
    assert "--nnodes=4" in chosen.torchrun and "--max-restarts=0" in chosen.torchrun
    assert re.search("SPARES +2 +of 6 nodes", chosen.block())


def test_a_job_that_may_shrink_needs_no_spare() -> None:
    chosen = plan(SLURM | {"SHRINK": "1"}, GPUS)
    assert chosen.job.outlives_nodes and chosen.job.training == 2
    assert re.search("SHRINK +1 +where no spare is left", chosen.block())
    assert not plan(SLURM | {"SHRINK": "0"}, GPUS).job.outlives_nodes


def test_processes_by_the_name_that_the_systems_have() -> None:
    chosen = plan(SLURM | {"GPUS_PER_NODE": "4"}, GPUS)
    assert chosen.processes == 4 and "as GPUS_PER_NODE" in chosen.block()


def test_only_flags_that_count_are_shown() -> None:
    """Only a trial's changes of the defaults; others may be given as often as one likes."""
    job = read_job(SLURM)
    flags = ["--lr=1", "--x", "--lr=2", "file", "--x", "--lrx=3", "a=1", "a=2"]
    chosen = make_plan(job, CPU, SLURM, "m", flags)
    assert chosen.block().splitlines()[-1].endswith(" m --x --lr=2 file --x --lrx=3 a=1 a=2")
    assert chosen.torchrun[-len(flags) :] == tuple(flags)


@pytest.mark.processes
def test_a_name_of_this_machine_that_means_loopback() -> None:
    """Debian's /etc/hosts has one; gloo must not send 127.0.1.1 to the other nodes."""
    route = subprocess.run(["ip", "-4", "route", "get", "192.0.2.1"], capture_output=True)
    found = look_at_node(read_job(SLURM | {"MASTER_ADDR": "localhost"}))
    assert (found.interface == "lo") == (route.returncode != 0)
    assert look_at_node(read_job(SLURM | {"MASTER_ADDR": "127.0.0.1"})).interface == "lo"


def test_a_port_of_one_node() -> None:
    """Any free one will do, as no other node needs to know it."""
    assert read_job({"MASTER_PORT": "0"}).port == 0
    with pytest.raises(RequestError, match="MASTER_PORT: must be from 0 to 65535, not 99999"):
        read_job({"MASTER_PORT": "99999"})


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,1,5", 3), ("GPU-6a, MIG-7b", 2), ("0,-1,1", 1), ("0,1,", 2)],
)
def test_only_the_visible_gpus_count(visible: str, count: int) -> None:
    assert plan({"CUDA_VISIBLE_DEVICES": visible}, GPUS).processes == count


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles", "-1,0"])
def test_gpus_that_are_hidden_do_not_count(hidden: str) -> None:
    for node in (GPUS, CPU):
        shown = plan({"CUDA_VISIBLE_DEVICES": hidden}, node).block()
        assert re.search("NPROC_PER_NODE +1 +no GPU", shown)
