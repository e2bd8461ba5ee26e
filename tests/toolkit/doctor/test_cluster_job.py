"""The doctor's job: which nodes it asks, which answers it accepts, and what slurm.conf says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sqshforge.doctor import cluster
from sqshforge.doctor.cluster import job
from sqshforge.doctor.cluster.cluster_findings import graced, pairs, slurm
from sqshforge.doctor.finding import Finding
from sqshforge.errors import MissingError, RequestError
from sqshforge.host.programs import Programs, Result

SINFO = """\
n1 all* idle
n2 all* idle
n3 all* alloc
n4 all* idle~
g1 gpu mix
g2 gpu drain
"""


class Slurm(Programs):
    """A Slurm with preset output, by the name of the program."""

    def __init__(self, said: Mapping[str, str], code: int = 0) -> None:
        self.said, self.code = said, code

    def which(self, program: str) -> Path | None:
        return Path("/usr/bin", program) if program in self.said else None

    def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
        words = tuple(map(str, argv))
        out = self.said[words[0]]
        return Result(words, self.code, "" if self.code else out, out if self.code else "")


HERE = Slurm({"srun": "--overlap", "sinfo": SINFO, "scontrol": "n7\nn8\n"})


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any job that the tests themselves run in."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_PARTITION"):
        monkeypatch.delenv(name, raising=False)


def test_all_idle_nodes_of_the_default_partition() -> None:
    plan = job.plan(None, "", HERE)
    assert (plan.count, plan.partition, plan.names) == (2, "all", ("n1", "n2"))
    assert plan.others == {"n3": "alloc", "n4": "idle~"}  # one that is powered down is left alone


def test_as_many_as_asked_and_waiting_for_those_that_are_not_idle() -> None:
    assert job.plan(1, "", HERE).names == ("n1",)
    waiting = job.plan(3, "", HERE)
    assert waiting.count == 3 and waiting.names == () and waiting.others == {}


def test_nodes_that_are_powered_down_can_be_started() -> None:
    sinfo = "c1 gpu idle~\nc2 gpu idle~\nc3 gpu down~\n"
    powered_down = Slurm({"srun": "", "sinfo": sinfo})
    with pytest.raises(MissingError) as raised:
        job.plan(None, "gpu", powered_down)
    assert raised.value.what == "no node of partition gpu is idle; powered down: c[1-2]"
    assert raised.value.fix == "--nodes=N --timeout=600 has Slurm start N of them (at most 2)"
    plan = job.plan(2, "gpu", powered_down)
    assert plan.count == 2 and plan.names == ()


def test_the_newest_image_is_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "gone.sqsh").symlink_to(tmp_path / "nowhere")
    assert cluster._newest(tmp_path) is None
    (tmp_path / "a.sqsh").touch()
    assert cluster._newest(tmp_path) == tmp_path / "a.sqsh"


def test_the_partition_of_slurm_s_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not job.plan(1, "", HERE).is_asked
    monkeypatch.setenv("SLURM_PARTITION", "gpu")
    assert job.plan(1, "", HERE).partition == "gpu" and job.plan(1, "", HERE).is_asked
    assert job.plan(1, "all", HERE).partition == "all"


def test_within_a_job_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[7-8]")
    plan = job.plan(None, "", HERE)
    assert plan.names == ("n7", "n8") and plan.inside
    words = job.srun(plan, "x", 60, [], None)
    assert {"--overlap", "--cpu-bind=none"} <= {*words}
    assert not any(word.startswith("--partition") for word in words)
    assert job.plan(1, "", HERE).names == ("n7",)
    before_20_11 = Slurm({"srun": "--cpu-bind", "sinfo": SINFO, "scontrol": "n7\nn8\n"})
    old = job.srun(job.plan(None, "", before_20_11), "x", 60, [], None)
    assert "--cpu-bind=none" in old and "--overlap" not in old
    for nodes, partition in ((3, ""), (None, "all")):
        with pytest.raises(RequestError):
            job.plan(nodes, partition, HERE)


@pytest.mark.parametrize(
    ("nodes", "partition", "programs", "kind", "shown"),
    [
        (None, "", Slurm({}), MissingError, "are not on this machine"),
        (None, "", Slurm({"srun": "", "sinfo": "no\ncontact"}, 1), MissingError, "answer: contact"),
        (None, "gpu", HERE, MissingError, "no node of partition gpu is idle"),
        (None, "nope", HERE, RequestError, "there is no partition 'nope'"),
        (5, "", HERE, RequestError, "partition all has 4 nodes, not 5"),
        (1, "", Slurm({"srun": "", "sinfo": "n1 gpu idle"}), RequestError, "is the default"),
    ],
)
def test_what_cannot_be_asked(
    nodes: int | None, partition: str, programs: Slurm, kind: type[Exception], shown: str
) -> None:
    with pytest.raises(kind, match=shown) as raised:
        job.plan(nodes, partition, programs)
    assert raised.value.fix  # type: ignore[attr-defined]


def test_the_call_has_a_task_a_node_and_a_limit() -> None:
    plan = job.plan(None, "", HERE)
    words = job.srun(plan, "x", 120, [Path("/fsx/m")], Path("/fsx/a b.sqsh"))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n[1-2]"} <= {*words}
    assert "--time=3" in words and "--partition=all" in words
    asked = json.loads(words[-1])
    assert asked == {"markers": ["/fsx/m"], "image": "/fsx/a b.sqsh", "seconds": 120}
    assert max(map(len, words)) < 64 << 10  # half of what Linux allows for one argument


def lines(name: str, shown: object, size: int = 20) -> list[bytes]:
    text = json.dumps(shown)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [
        f"sqshforge-doctor {name} {number}/{len(pieces)} {piece}".encode()
        for number, piece in enumerate(pieces, 1)
    ]


def test_answers_come_in_pieces_in_any_order_between_other_lines() -> None:
    answers = job.Answers()
    one, two = (lines(name, {"python": "3.11", "node": "other"}) for name in ("n1", "n2"))
    noise = [
        b"",
        b"\xff\0",
        b"a prolog says sqshforge-doctor",
        b"sqshforge-doctor n3 1/1 {",
        *one[:1],
    ]
    for line in [*reversed(one), *noise, *(b"1: " + line for line in two)]:
        answers.take(line, 0.0)
    assert sorted(answers.nodes) == ["n1", "n2"]
    assert answers.nodes["n1"].python == "3.11" and answers.nodes["n1"].node == "n1"


def test_where_the_nodes_are_known_no_other_name_counts() -> None:
    answers = job.Answers(("n1",))
    for line in (*lines("n1", {}), *lines("n9", {})):
        answers.take(line, 0.0)
    assert [*answers.nodes] == ["n1"]


def test_an_answer_without_end_is_none() -> None:
    answers = job.Answers()
    for line in lines("n1", {"python": "3" * (job.LONGEST + 1)}, 700):
        answers.take(line, 0.0)
    for line in lines("n2", "[" * 60_000, 700):
        answers.take(line, 0.0)
    answers.take(b"sqshforge-doctor n3 1/1 " + b"[" * 50_000, 0.0)
    assert "n1" not in answers.nodes and "n3" not in answers.nodes


def test_a_clock_is_known_by_when_it_was_asked_and_when_it_answered() -> None:
    answers = job.Answers()
    answers.take(b"sqshforge-doctor n1 clock 1000.500000", 1000.0)
    assert answers.clocks == {}  # it was not asked
    answers.asked_at = 1000.0
    answers.take(b"sqshforge-doctor n1 clock 1090.500000", 1001.0)
    assert answers.clocks == {"n1": (89.5, 90.5)}


CONFIG = """\
Configuration data as of 2026-11-24T12:00:00
KillWait                = 30 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SlurmctldParameters     = (null)
"""


def settled(config: str, *who: str) -> dict[str, Finding]:
    return {row.finding.what: row.finding for row in slurm(pairs(config), who)}


def test_what_slurm_does_to_a_preempted_job() -> None:
    assert settled("")["preemption"].ok
    assert "without GraceTime" in settled(CONFIG)["preemption"].detail
    found = settled(CONFIG, "partition low")["preemption"]
    assert not found.ok and "partition low" in found.detail and "SIGTERM goes to" in found.detail
    assert found.fix == "SlurmctldParameters=preempt_send_user_signal in slurm.conf"
    newer = settled(CONFIG + "PreemptParameters = (null)\n", "QOS x")["preemption"]
    assert newer.fix == "PreemptParameters=send_user_signal in slurm.conf"
    for setting in (
        "PreemptParameters = youngest_first,send_user_signal",
        "SlurmctldParameters = preempt_send_user_signal",
    ):
        assert settled(f"{CONFIG}{setting}\n", "partition low")["preemption"].ok


def test_kill_wait_is_what_a_cancelled_job_has() -> None:
    assert settled(CONFIG)["KillWait"].ok
    assert not settled(CONFIG.replace("30 sec", "5 sec"))["KillWait"].ok


def test_who_has_a_grace_time() -> None:
    partitions = (
        "PartitionName=low GraceTime=60 PreemptMode=REQUEUE\n"
        "PartitionName=high GraceTime=0 PreemptMode=OFF\n"
    )
    assert graced(partitions, "normal|00:00:00\nspot|00:02:00\n") == ["partition low", "QOS spot"]
