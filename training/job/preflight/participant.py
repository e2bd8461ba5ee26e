"""A node's part, also node 0's: connect, report its findings, and do what the coordinator asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from training.errors import BadNode, TrainingError
from training.job.plan import Plan
from training.job.preflight import checks_accelerator, checks_local
from training.job.preflight.checks_network import BadNodes, SharedFolder
from training.job.preflight.coordinator import Coordinator
from training.job.preflight.finding import call_with_timeout
from training.job.preflight.protocol import Wire, connect
from training.job.preflight.settings import NodeNames, Settings, coordinator_port, read_settings
from training.job.preflight.workers import Workers

WRITING = 20.0
"""Seconds for a few bytes in the shared folder."""


def run(
    plan: Plan,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    root: Path = Path("/"),
) -> None:
    """Check this node and, with the other nodes of the job, all. Every node must call this.

    `clock` is this node's, in seconds since 1970; `root` is where /sys and /dev are looked for.
    Raises BadNode on all nodes if one is bad or cannot be reached, and RequestError.
    """
    settings = read_settings(environment)
    job = plan.job
    if not settings.wanted:
        if job.node_rank == 0:
            print("training.preflight: left out, as PREFLIGHT=0 asks", flush=True)
        return
    port = coordinator_port(job)
    names = NodeNames(job, environment)
    address = job.address if job.nodes > 1 else "127.0.0.1"
    if job.node_rank:
        Participant(plan, environment, settings, names, clock, root).run(address, port)
        return
    if settings.shared is not None:
        SharedFolder(settings.shared, job).remove_earlier()
    try:
        coordinator = Coordinator(job, settings, names, clock, os.urandom(8).hex(), port)
    except OSError as error:
        why = f"port {port} of {names[0]}, where the nodes meet: {error.strerror or error}"
        raise BadNode(f"preflight: {why}; fix: choose another by MASTER_PORT") from error
    thread = threading.Thread(target=coordinator.run, name="preflight-coordinator", daemon=True)
    thread.start()
    Participant(plan, environment, settings, names, clock, root).run(address, coordinator.port)
    thread.join(settings.limit)


class Participant:
    """One node's side of the conversation with the coordinator."""

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        settings: Settings,
        names: NodeNames,
        clock: Callable[[], float],
        root: Path,
    ) -> None:
        self._plan, self._environment, self._settings = plan, environment, settings
        self._names, self._clock, self._root = names, clock, root
        self._nonce = ""
        self._shared: SharedFolder | None = None
        self._bad_nodes: BadNodes | None = None
        if settings.shared is not None:
            self._shared = SharedFolder(settings.shared, plan.job)
            if plan.job.id != "local":
                self._bad_nodes = BadNodes(settings.shared, plan.job)
        # A Neuron core belongs to one process, which takes minutes to load a program: there a
        # single worker tries the hosts' network instead.
        self._workers = Workers(
            1 if checks_accelerator.count_chips(root) else plan.processes,
            {**environment, **{one.name: one.value for one in plan.variables}},
        )

    def run(self, address: str, port: int) -> None:
        """Take part to the end. Raises BadNode if any node is bad, or node 0 is gone."""
        with self._workers:
            wire = self._meet(address, port)
            try:
                self._talk(wire)
            except (OSError, ValueError) as error:
                first = self._names[0]
                why = f"{first}, the first node, has ended or fallen silent: {error}"
                raise BadNode(f"preflight: {why}", local=True) from error
            finally:
                wire.close()
                if self._shared is not None:
                    self._calmly(self._shared.remove)

    def _meet(self, address: str, port: int) -> Wire:
        """Connect, introduce this node, and report its own checks. Raises TrainingError."""
        job, limit = self._plan.job, self._settings.limit
        try:
            wire = connect(address, port, limit)
            wire.send({"run": job.run_id, "rank": job.node_rank})
            welcome = wire.receive(limit)
        except (OSError, ValueError) as error:
            place = f"{self._names[0]}, the first node, at {address}:{port}"
            raise BadNode(f"preflight: {self._why_not(place, error)}", local=True) from error
        if "refused" in welcome:
            raise TrainingError(f"preflight: {address}:{port}: {welcome['refused']}", local=True)
        self._nonce = welcome["nonce"]
        # In nine tenths of the time, so that even a check that hangs is reported before the limit.
        report = checks_local.check_node(
            self._plan,
            self._environment,
            self._workers,
            self._shared,
            self._nonce,
            0.9 * limit,
            self._root,
        )
        wire.send({"round": welcome["round"], "report": report.pack()})
        return wire

    def _talk(self, wire: Wire) -> None:
        while True:
            asked = wire.receive(self._settings.timeout)
            if asked["do"] == "end":
                answer = self._end(asked)
                wire.send({"round": asked["round"], **answer})
                return self._outcome(asked, answer.get("unwritten", ""))
            tasks = {
                "look": self._look,
                "clock": self._tell_clock,
                "ready": self._be_ready,
                "reduce": self._reduce,
            }
            wire.send({"round": asked["round"], **tasks[asked["do"]](asked)})

    def _look(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._shared is not None
        shared, ranks = self._shared, asked["ranks"]
        try:
            return {"unseen": call_with_timeout(WRITING, lambda: shared.unseen(self._nonce, ranks))}
        except TimeoutError:
            return {"unseen": ranks}

    def _tell_clock(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"clock": self._clock()}

    def _be_ready(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._workers.ask([{"do": "ready"}] * self._workers.size, self._settings.limit)
        return {}

    def _reduce(self, asked: dict[str, Any]) -> dict[str, Any]:
        order = {key: asked[key] for key in ("name", "store", "world")}
        order |= {"do": "reduce", "seconds": 0.4 * asked["seconds"]}
        orders = [{**order, "rank": asked["first"] + i} for i in range(asked["processes"])]
        answers = self._workers.ask(orders, asked["seconds"])
        return {"fault": next((one["fault"] for one in answers if "fault" in one), "")}

    def _end(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Print the table if there is one, and write down the bad nodes if asked to."""
        if "table" in asked:
            print(asked["table"], flush=True)
        bad_nodes = self._bad_nodes
        if asked["hosts"] is None or bad_nodes is None:
            return {}
        hosts = asked["hosts"]
        try:
            call_with_timeout(WRITING, lambda: bad_nodes.write(hosts))
        except OSError as error:
            return {"unwritten": f"{bad_nodes.path} cannot be written: {error.strerror or error}"}
        return {}

    def _outcome(self, asked: dict[str, Any], unwritten: str) -> None:
        if unwritten:
            print(f"training.preflight: {unwritten}", flush=True)
        if not asked["faults"]:
            return
        lines = list(asked["wrong"])
        if not lines:
            named = ", ".join(asked["bad"]) or "none that can be named"
            lines = [f"bad nodes: {named}; {self._names[0]} says what is wrong"]
        raise BadNode("\n  ".join(["preflight: the job cannot train on these nodes", *lines]))

    def _why_not(self, place: str, error: Exception) -> str:
        """Say why node 0 cannot be reached, and record it as bad if it never came."""
        shared, bad_nodes = self._shared, self._bad_nodes
        if shared is not None and self._calmly(lambda: shared.has_come(0)):
            return (
                f"{place} cannot be reached, though its file in {shared.folder} shows that it has "
                f"come: the network between it and this node: {error}"
            )
        host = self._names.host(0)
        if bad_nodes is not None and host and not self._calmly(bad_nodes.is_news):
            self._calmly(lambda: bad_nodes.write([host]))
        return f"{place} has not come within {self._settings.limit:g} s: {error}"

    @staticmethod
    def _calmly(work: Callable[[], object]) -> object:
        """Do work that is not worth an error of its own, within a time limit."""
        try:
            return call_with_timeout(WRITING, work)
        except OSError:
            return None
