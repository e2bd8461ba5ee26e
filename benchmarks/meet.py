"""Measure how long many nodes' agents take to meet by torchrun's static rendezvous, on one machine.

usage: python -m benchmarks.meet [--nodes 256 512 1024 2000] [--small] [--output DIR]

Every node is torch's own agent (benchmarks/scale/agent.py) in a thread of one of a few processes;
node 0, whose store all of them use, has a process of its own. In place of a node's 8 processes, the
agent connects to the store 8 times, as they do, and makes the requests of gloo's lazy start. Then
all agents leave through torch's own barrier. For each number of nodes:

met           seconds from the start of the first agent until all have their ranks
connected     seconds from then until the ranks are connected and have made their requests
left          seconds from when all are asked to leave until the last has left
descriptors   files that node 0 has open once all are connected, nearly all of them sockets
threads       of node 0 at that time
memory        bytes of node 0 at that time, minus those before
busy          processor seconds of node 0 in total

All nodes share this machine's processors, and nothing goes over a network. torch looks up the name
of each connection's other side; where no name server answers, each lookup takes seconds, so run it
as `unshare -rn sh -c 'ip link set lo up; exec python -m benchmarks.meet'`. Writes meet.json to
benchmarks/results/; exits 1 if an agent does not get its own ranks.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import options
from benchmarks.models import machine
from tests.support.ports import free_ports

NODES = (256, 512, 1024, 2000)
RANKS = 8  # per node
PROCESSES = 4  # the processes among which the threads of the other nodes are divided
TIMEOUT = 300.0  # s
STACK = 1 << 20  # bytes of a thread


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, metavar="N")
    given = options.parse(parser)
    nodes: Sequence[int] = (24,) if given.small else given.nodes
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for count in nodes:
        if count < 2 or count * (1 + RANKS) + 64 > most:
            parser.error(f"--nodes: {count} cannot be tried with {most:,} open files (ulimit -Hn)")
    rows = [measure(count, 1 if given.small else PROCESSES) for count in nodes]
    result = {
        "what": f"agents of torchrun's static rendezvous, each with {RANKS} connections of ranks",
        "machine": machine(),
        "rows": rows,
    }
    return options.finish(given, "meet", result, met=all(row["own_ranks"] for row in rows))


def measure(nodes: int, processes: int) -> dict[str, Any]:
    """Let `nodes` nodes meet and leave, and return the measurements."""
    port = str(free_ports(1)[0])
    step = -(-(nodes - 1) // processes)
    others = [range(begin, min(begin + step, nodes)) for begin in range(1, nodes, step)]
    code = "import sys; from benchmarks import meet; meet.be_agents(*map(int, sys.argv[1:]))"
    parts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(nodes), port, str(part.start), str(part.stop)],
            cwd=options.ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for part in (range(1), *others)
    ]
    try:
        _say_all(parts)  # wait until all have loaded torch before the first one begins
        met = _say_all(parts)
        seen, *_ = _say_all(parts)  # of node 0, while all are connected
        left = _say_all(parts)
    finally:
        for one in parts:
            one.kill()
            one.communicate()
    began, own = min(one["began"] for one in met), max(one["met"] for one in met)
    row = {
        "nodes": nodes,
        "met": round(own - began, 2),
        "connected": round(max(one["connected"] for one in met) - own, 2),
        "left": round(max(one["left"] for one in left) - min(one["asked"] for one in left), 2),
        **seen,
        "busy": left[0]["busy"],
        "own_ranks": all(one["own_ranks"] for one in met),
    }
    print(
        f"{nodes:,} nodes: met in {row['met']:.2f} s, {nodes * RANKS:,} ranks connected "
        f"{row['connected']:.2f} s later, left in {row['left']:.2f} s; node 0: "
        f"{row['descriptors']:,} descriptors, {row['threads']} threads, "
        f"{row['memory'] / 1e6:.0f} MB, busy for {row['busy']:.1f} s",
        flush=True,
    )
    return row


def _say_all(parts: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait until every process has reported something, then let all of them go on."""
    said = []
    for one in parts:
        assert one.stdout is not None
        line = one.stdout.readline()
        if not line:
            sys.exit("an agent's process has ended before the others")
        said.append(json.loads(line))
    for one in parts:
        assert one.stdin is not None
        one.stdin.write("go on\n")
        one.stdin.flush()
    return said


def be_agents(nodes: int, port: int, begin: int, end: int) -> None:
    """Run the agents of nodes begin..end-1, in a process of their own; does not return."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    from benchmarks.scale.agent import Agent

    agents = [Agent(nodes, number, RANKS, port, TIMEOUT) for number in range(begin, end)]
    before = _resident()
    threading.stack_size(STACK)
    threads = [threading.Thread(target=one.run, daemon=True) for one in agents]
    _say({})
    began = time.time()
    for thread in threads:
        thread.start()
    while not all(one.connected for one in agents):
        for agent, thread in zip(agents, threads, strict=True):
            if not thread.is_alive() and not agent.connected:
                os._exit(1)  # its thread has printed why; the others would wait for it forever
        time.sleep(0.05)
    _say(
        {
            "began": began,
            "met": max(one.met for one in agents),
            "connected": max(one.connected for one in agents),
            "own_ranks": all(one.has_its_ranks for one in agents),
        }
    )
    here = Path("/proc/self")
    _say(
        {
            "descriptors": len(list((here / "fd").iterdir())),
            "threads": len(list((here / "task").iterdir())),
            "memory": _resident() - before,
        }
    )
    asked = time.time()
    for one in agents:
        one.leave.set()
    for thread in threads:
        thread.join()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    busy = round(spent.ru_utime + spent.ru_stime, 1)
    _say({"asked": asked, "left": time.time(), "busy": busy})
    os._exit(0)  # closing thousands of connections one by one would take too long


def _say(what: dict[str, Any]) -> None:
    """Report what has been done, and wait until all processes have reported."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    options.run(main)
