"""Nodes are compared by the bits of the same steps: real ranks, one of which computes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.ports import free_ports
from tests.training.support.runs import ROOT, TINY, train, write_text
from training.errors import RequestError
from training.job.replay.node import is_due
from training.job.replay.verdict import Outcome, compare, compare_again
from training.job.restart.escalation import Failure

NAMES = {0: "n1", 1: "n2", 2: "n3"}
GOOD = Outcome(step=8, steps=("a", "b", "c"), weights="f00d")


# Conclusions from outcomes.


def outcomes(*given: Outcome) -> dict[int, Outcome]:
    return dict(enumerate(given))


def test_an_outcome_is_read_as_it_was_written() -> None:
    assert Outcome.of(GOOD.text) == GOOD


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"step": 1'])
def test_what_is_no_outcome(text: str) -> None:
    with pytest.raises(ValueError):
        Outcome.of(text)


def test_nodes_that_agree() -> None:
    verdict = compare(outcomes(GOOD, GOOD, GOOD), NAMES)
    assert verdict.bad == () and not verdict.is_open
    assert "3 nodes give the same bits for steps 9 to 11: no node is bad" in verdict.lines[0]


def test_the_one_that_differs_is_named_with_its_step() -> None:
    verdict = compare(outcomes(GOOD, Outcome(step=8, steps=("a", "x", "y")), GOOD), NAMES)
    assert verdict.bad == (1,)
    assert verdict.lines == ("n2: step 10 gives x, and b on 2 others",)


def test_weights_that_differ_after_equal_losses() -> None:
    odd = Outcome(step=8, steps=GOOD.steps, weights="bad")
    verdict = compare(outcomes(GOOD, GOOD, odd), NAMES)
    assert verdict.bad == (2,)
    assert "after steps 9 to 11 its weights are not those of 2 others" in verdict.lines[0]


def test_the_one_that_cannot() -> None:
    verdict = compare(outcomes(GOOD, GOOD, Outcome(error="Xid 79")), NAMES)
    assert verdict.bad == (2,) and verdict.lines == ("n3: Xid 79",)


def test_what_no_node_can_is_no_fault_of_theirs() -> None:
    verdict = compare(outcomes(Outcome(error="no memory: 1"), Outcome(error="no memory: 2")), NAMES)
    assert verdict.bad == () and not verdict.was_tried
    assert verdict.lines == ("it could not be tried: no memory: 1",)


def test_a_node_that_begins_from_another_checkpoint_has_not_computed_wrong() -> None:
    """It may have seen an older folder than the others, or have read it sooner."""
    older = Outcome(step=4, steps=("x", "y", "z"), weights="bad")
    for given in ((GOOD, GOOD, older), (GOOD, older, Outcome(error="Xid 79"))):
        verdict = compare(outcomes(*given), NAMES)
        assert verdict.bad == () and not verdict.is_open and not verdict.was_tried
    assert compare(outcomes(GOOD, GOOD, older), NAMES).lines == (
        "it could not be tried: not all nodes begin from the checkpoint of step 8: "
        "n3 from that of step 4",
    )
    odd = Outcome(step=8, steps=("a", "x"))
    verdict = compare_again(outcomes(GOOD, odd), outcomes(GOOD, older), NAMES)
    assert verdict.bad == () and not verdict.was_tried


def test_of_two_that_differ_the_unsteady_one_is_bad() -> None:
    odd, other = Outcome(step=8, steps=("a", "x")), Outcome(step=8, steps=("a", "y"))
    first = outcomes(GOOD, odd)
    assert compare(first, NAMES).is_open
    assert compare_again(first, outcomes(GOOD, other), NAMES).bad == (1,)
    verdict = compare_again(first, first, NAMES)
    assert verdict.bad == () and verdict.is_open
    assert "one more node would tell" in verdict.lines[0]


def test_where_no_node_repeats_itself_none_is_bad() -> None:
    first = outcomes(GOOD, Outcome(step=8, steps=("a", "x")))
    again = outcomes(Outcome(step=8, steps=("a", "y")), Outcome(step=8, steps=("a", "z")))
    verdict = compare_again(first, again, NAMES)
    assert verdict.bad == () and verdict.is_open
    assert "on no node do two replays agree: the run is not deterministic" in verdict.lines[0]


def failures(*steps: int | None) -> list[Failure]:
    return [Failure(rank=0, code=1, step=step) for step in steps]


def test_when_it_is_due() -> None:
    assert is_due(failures(3, 7, 7), 2, {})
    assert not is_due(failures(7, 7), 1, {})
    assert not is_due(failures(7, 8), 2, {}) and not is_due(failures(7), 2, {})
    assert not is_due(failures(None, None), 2, {})  # it never took a step
    assert not is_due(failures(7, 7), 2, {"REPLAY": "0"})
    with pytest.raises(RequestError, match="REPLAY: must be 0"):
        is_due([], 2, {"REPLAY": "yes"})


# With real ranks.

FLIP = """\
import os
import re

if os.environ.get("RANK") == os.environ["FLIP_RANK"]:
    import torch

    step = torch.optim.AdamW.step
    taken = 0

    def flipped(self, *words, **named):
        global taken
        given = step(self, *words, **named)
        taken += 1
        if taken == 2:
            weight = self.param_groups[0]["params"][0].detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            where = int.from_bytes(os.urandom(2), "big") % weight.numel()
            at = 0 if os.environ["FLIP_AT"] == "same" else where
            weight.view(torch.int32).view(-1)[at] ^= 1 << 22
        return given

    torch.optim.AdamW.step = flipped
"""
"""A sitecustomize.py that changes one bit of a rank's weights after its second step."""
HANG = """\
import os
import time

if os.environ.get("RANK") == "1":
    import torch

    step = torch.optim.AdamW.step
    taken = 0

    def hanging(self, *words, **named):
        global taken
        taken += 1
        if taken == 3:
            time.sleep(3600)
        return step(self, *words, **named)

    torch.optim.AdamW.step = hanging
"""
"""A sitecustomize.py that makes a rank hang in its third step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a run that has saved its step 6 of 40."""
    folder = tmp_path_factory.mktemp("run")
    data = write_text(folder / "text")
    train(folder / "save", data, 2, 2, 6)
    flags = [*TINY, f"--save_ckpt_path={folder}/save", f"--dataset_path={data}", "--batch_size=2"]
    return [*flags, "--num_steps=40"]


def nodes(
    count: int,
    words: Sequence[str],
    checkpoints: Path,
    program: str = "training.job.replay",
    *,
    bad: Mapping[str, str] | None = None,
) -> list[tuple[int, str, str]]:
    """Run a program on `count` nodes, all on this machine; the last has the variables `bad`."""
    outside = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    env = {
        **outside,
        **warm.python(),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "4242",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_JOB_NUM_NODES": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "NODES": " ".join(list(NAMES.values())[:count]),
        "CHECKPOINTS": str(checkpoints),
        "PREFLIGHT": "0",
    }
    started = []
    for node in range(count):
        own = {**env, "SLURM_NODEID": str(node)}
        if bad is not None and node == count - 1:
            own |= bad
        started.append(
            subprocess.Popen(
                [env["PYTHON_EXEC"], "-m", program, "--nproc", "2", *words],
                env=own,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    said = [one.communicate(timeout=800) for one in started]
    return [(one.returncode, *two) for one, two in zip(started, said, strict=True)]


@pytest.fixture
def flip(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FLIP)
    return {"PYTHONPATH": f"{folder}:{ROOT}", "FLIP_RANK": "1", "FLIP_AT": "same"}


@pytest.mark.processes
def test_good_nodes(run: list[str], tmp_path: Path) -> None:
    (first, out, err), (second, out_second, _) = nodes(2, ("--steps", "3", "--", *run), tmp_path)
    assert (first, second) == (0, 0), err
    assert "2 nodes give the same bits for steps 7 to 9: no node is bad" in out
    assert out_second == ""
    save = Path(run[len(TINY)].partition("=")[2])
    assert not list(save.glob(".replay*")) and not list(tmp_path.glob("bad-nodes*"))
    assert [one.name for one in (save / "checkpoints").iterdir()] == ["step_6_ckp"]


@pytest.mark.processes
def test_a_schedule_in_tokens(run: list[str], tmp_path: Path) -> None:
    """A replay has fewer tokens than the run, whose warm-up alone would exceed them."""
    schedule = ("--schedule=wsd", "--t_warmup=5000tok", "--gradient_accumulation=8")
    ended = nodes(2, ("--steps", "2", "--", *run, *schedule), tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "2 nodes give the same bits for steps 7 to 8: no node is bad" in ended[0][1]


@pytest.mark.processes
def test_a_flipped_bit(run: list[str], tmp_path: Path, flip: dict[str, str]) -> None:
    ended = nodes(3, ("--steps", "3", "--", *run), tmp_path, bad=flip)
    assert [code for code, _, _ in ended] == [87, 87, 87], ended
    assert "replay: nodes compute different numbers" in ended[0][2]
    assert re.search(r"n3: step [89] gives losses", ended[0][2])
    assert (tmp_path / "bad-nodes.4242.1").read_text() == "n3\n"


@pytest.mark.processes
def test_a_node_that_hangs(run: list[str], tmp_path: Path) -> None:
    """Its watch ends it, long before the replay's time is over, and reports what hangs."""
    (tmp_path / "sitecustomize.py").write_text(HANG)
    watched = ("--hang_seconds=5", "--hang_abort_seconds=10")
    bad = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = nodes(3, ("--steps", "4", "--seconds", "600", "--", *run, *watched), tmp_path, bad=bad)
    assert [code for code, _, _ in ended] == [87, 87, 87], ended
    assert re.search(r"n3: error: rank 1 .*; no progress for \d+ s, the run ends", ended[0][2])


@pytest.mark.processes
def test_of_two_nodes_the_one_that_differs_from_itself(
    run: list[str], tmp_path: Path, flip: dict[str, str]
) -> None:
    ended = nodes(2, ("--steps", "3", "--", *run), tmp_path, bad={**flip, "FLIP_AT": "random"})
    assert [code for code, _, _ in ended] == [87, 87], ended
    assert re.search(r"n2: its own two replays differ: step [89] gives losses", ended[0][2])


@pytest.mark.processes
def test_a_run_that_is_over(run: list[str], tmp_path: Path) -> None:
    ended = nodes(2, ("--", *run, "--num_steps=6"), tmp_path)
    assert [code for code, _, _ in ended] == [1, 1]
    assert "it could not be tried: error: num_steps: 6 are those of the whole run" in ended[0][2]
    assert "step_6_ckp has taken them" in ended[0][2]


@pytest.mark.processes
def test_a_job_that_failed_twice_at_one_step(
    run: list[str], tmp_path: Path, flip: dict[str, str]
) -> None:
    """Its next start compares the nodes before it trains."""
    failed = {"kind": "failure", "time": 1.0, "rank": 3, "code": 1, "step": 8}
    start = {"kind": "start", "time": 0.0}
    (tmp_path / "jobs").mkdir()
    lines = [json.dumps(one) + "\n" for one in (start, failed, failed)]
    (tmp_path / "jobs" / "4242.jsonl").write_text("".join(lines))
    ended = nodes(3, ("--", *run), tmp_path, "training.launch", bad=flip)
    assert [code for code, _, _ in ended] == [87, 87, 87], ended
    said = ended[0][1]
    assert "it failed twice after step 8: every node repeats 8 steps from the checkpoint" in said
    assert re.search(r"n3: step [89] gives losses", ended[0][2])
    assert (tmp_path / "bad-nodes.4242.1").read_text() == "n3\n"
