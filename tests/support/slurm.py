"""A real Slurm of two or more nodes on this machine, for the length of a block.

munged, slurmctld and one slurmd per node run from a private folder, on free ports, as the caller's
children: they die with it, and several clusters can run side by side. Only root can do this. The
nodes are all this machine or, with `apart`, separate machines, each with its own network, host
name, mounts and disk (`local`), and with an ordinary user that this machine does not know.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import processes, slurm_config
from tests.support.network_namespaces import Bridge, bridged
from tests.support.slurm_config import NODES

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
USER = 41236  # the ordinary user of nodes that are apart; Slurm starts no job of an unknown user
ENTRIES = {
    "passwd": f"trainer:x:{USER}:{USER}::/:/bin/bash\n",
    "group": f"trainer:x:{USER}:\n",
}
# /dev/fuse with the mode that udev gives it, for the user's containers.
FUSE = (
    "mount -t tmpfs none /mnt; mknod -m 0666 /mnt/fuse c 10 229; "
    "mount --bind /mnt/fuse /dev/fuse; umount --lazy /mnt;"
)
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT")


class ClusterError(Exception):
    """The cluster cannot start, or does not do what was waited for; the message names the logs."""


@dataclass
class Cluster:
    """The nodes, n1 and n2 unless others are named, and the clients' side of the cluster."""

    folder: Path
    env: dict[str, str]
    bridge: Bridge | None = None
    nodes: Sequence[str] = NODES
    planted: Mapping[str, Callable[[Cluster], str]] = field(default_factory=dict)
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def local(self) -> Path:
        """The folder that is local to each node, if the nodes are apart."""
        return self.folder / "local"

    @property
    def knows_user(self) -> str:
        """Lines of shell that make the user known in a mount namespace."""
        return "".join(f"mount --bind {self.folder}/{name} /etc/{name};" for name in ENTRIES)

    def log(self, daemon: str) -> Path:
        """Return the log of `slurmctld`, `munged` or a node."""
        return self.folder / f"{daemon}.log"

    def ask(
        self,
        *words: str | Path,
        text: str = "",
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """Run a Slurm command to its end and return its output; `ClusterError` if it fails."""
        done = subprocess.run(
            [str(word) for word in words],
            input=text,
            capture_output=True,
            text=True,
            env={**self.env, **(env or {})},
            cwd=folder or self.folder,
            timeout=300,
        )
        if done.returncode != 0:
            raise ClusterError(f"{words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def submit(
        self,
        *words: str | Path,
        script: str = "",
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> int:
        """Submit from a folder, as `sbatch WORDS < script` does; returns the job's number."""
        answer = self.ask("sbatch", "--parsable", *words, text=script, env=env, folder=folder)
        return int(answer.partition(";")[0])

    def output(self, job: int) -> str:
        """Return what the job has written so far."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def show(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, by name."""
        words = self.ask("scontrol", "show", "job", "--oneliner", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int) -> str:
        """Return the job's state in Slurm's words: PENDING, RUNNING, COMPLETED, ..."""
        return self.show(job)["JobState"]

    def exit_code(self, job: int) -> int:
        """Return the exit code of the job's script."""
        return int(self.show(job)["ExitCode"].partition(":")[0])

    def restarts(self, job: int) -> int:
        return int(self.show(job)["Restarts"])

    def wait(self, job: int, timeout: float = 300) -> str:
        """Wait until the job has ended and its processes are gone; returns its last state."""
        self.until(
            lambda: self.state(job) in ENDED and not self.processes(job=job),
            timeout,
            lambda: f"job {job} has not ended: {self.show(job)}",
            every=0.5,  # each look starts a program, and reads all processes
        )
        return self.state(job)

    def until(
        self,
        holds: Callable[[], object],
        timeout: float,
        what: Callable[[], str] | str,
        every: float = 0.1,
    ) -> None:
        """Check every `every` seconds until something holds.

        Raises ClusterError with the message `what` if it does not hold within the timeout.
        """
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                shown = what if isinstance(what, str) else what()
                raise ClusterError(f"after {timeout:.0f} s: {shown}")
            time.sleep(every)

    def cancel(self, job: int, *words: str) -> None:
        """End a job as `scancel` does, or signal it: `cancel(job, "--signal=TERM")`."""
        self.ask("scancel", *words, str(job))

    def processes(self, node: str | None = None, job: int | None = None) -> list[int]:
        """Return the processes of jobs, of a node or a job or all, without slurmstepd.

        They are found by the variables that Slurm set, and by descent, as a container may have
        emptied its environment.
        """
        marks = {"SLURM_CONF": self.env["SLURM_CONF"], "SLURMD_NODENAME": node}
        return processes.having(marks | ({"SLURM_JOB_ID": str(job)} if job else {}))

    def kill_processes(self, node: str, job: int) -> list[int]:
        """Kill -9 all of a job's processes on a node, as the kernel does when memory runs out."""
        victims = self.processes(node, job)
        processes.kill(victims)
        return victims

    def lose(self, node: str) -> None:
        """Take a node away: slurmd, its step managers and all they started die at once."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        # Repeatedly: a task may be just starting, and killed processes take a moment to vanish.
        deadline = time.monotonic() + 60
        while victims := self.processes(node):
            above = {processes.parent(pid) for pid in victims}
            managers = [pid for pid in above if processes.command(pid).startswith("slurmstepd")]
            processes.kill(managers + victims)
            if time.monotonic() > deadline:
                raise ClusterError(f"{node} does not die: {victims}")
            time.sleep(0.02)

    def bring(self, node: str) -> None:
        """Start a node's slurmd, for the first time or again, and wait until it accepts jobs."""
        self.start_slurmd(node)
        self.until(
            lambda: self.is_idle(node), 300, lambda: f"{node} is not idle{self.last_words()}"
        )

    def stop_slurmd(self, node: str) -> None:
        """Stop a node's slurmd, but nothing that it has started."""
        daemon = self.daemons.pop(node)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)

    def start_slurmctld(self) -> None:
        words = [_find("slurmctld"), "-D"]
        if self.bridge:
            for name, entry in ENTRIES.items():
                (self.folder / name).write_text(Path("/etc", name).read_text() + entry)
            script = f'{self.knows_user} exec "$0" "$@"'
            words = ["unshare", "--mount", "sh", "-c", script, *words]
        self.start("slurmctld", *words)

    def start_slurmd(self, node: str) -> None:
        words = [_find("slurmd"), "-D", "-N", node]
        if self.bridge:
            machine = self.bridge.machines[self.nodes.index(node)]
            self.local.mkdir(exist_ok=True)
            disk = f"mount -t tmpfs -o size=2g none {self.local};"
            odd = self.planted[node](self) if node in self.planted else ""
            words = machine.enter(*words, before=disk + FUSE + self.knows_user + odd)
        self.start(node, *words)

    def is_idle(self, node: str) -> bool:
        """Tell whether a node is up and runs nothing."""
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                raise ClusterError(f"{name} has ended{self.last_words()}")
        with contextlib.suppress(ClusterError):  # slurmctld may not answer yet
            return self.ask("sinfo", "--noheader", "--nodes", node, "-o", "%T") == "idle"
        return False

    def last_words(self) -> str:
        """Return the end of every daemon's log."""
        logs = [self.log(name) for name in ("munged", "slurmctld", *self.nodes)]
        return "".join(
            f"\n--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:])
            for log in logs
            if log.exists()
        )

    def start(self, name: str, program: str, *words: str) -> None:
        """Start a daemon that ends with us, however we end."""
        with self.log(name).open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", _find(program), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )


@contextlib.contextmanager
def cluster(
    *,
    kill_wait: int = 30,
    apart: bool = False,
    settings: Sequence[str] = (),
    planted: Mapping[str, Callable[[Cluster], str]] | None = None,
    nodes: Sequence[str] = NODES,
) -> Iterator[Cluster]:
    """Start a cluster, and stop it at the end of the block whatever happens in it.

    `kill_wait` is Slurm's own setting: seconds between SIGTERM and SIGKILL. `settings` are further
    lines of slurm.conf. `planted` maps nodes to lines of shell that make them odd: if the nodes are
    apart, they run in the node's own mounts before its slurmd starts. Raises ClusterError if
    something is not installed, we are not root, or a daemon does not come up.
    """
    for program in PROGRAMS:
        _find(program)
    if os.geteuid() != 0:
        raise ClusterError("the test cluster's daemons need root: sudo make test")
    with bridged(nodes) if apart else contextlib.nullcontext() as bridge:
        started = _begin(kill_wait, bridge, settings, planted or {}, nodes)
        try:
            yield started
        finally:
            _end(started)


def _begin(
    kill_wait: int,
    bridge: Bridge | None,
    settings: Sequence[str],
    planted: Mapping[str, Callable[[Cluster], str]],
    nodes: Sequence[str],
) -> Cluster:
    """Retry with other free ports if one was taken between finding it and the start."""
    outside = {name: value for name, value in os.environ.items() if not _is_slurm(name)}
    for attempt in range(3):
        config = slurm_config.write(kill_wait, bridge, settings, nodes)
        env = {**outside, "SLURM_CONF": str(config)}
        candidate = Cluster(config.parent, env, bridge, nodes, planted)
        try:
            candidate.start("munged", "munged", *slurm_config.munged(candidate.folder))
            socket_path = candidate.folder / "munge.socket"
            candidate.until(socket_path.exists, 120, "munged does not come up")
            candidate.start_slurmctld()
            for node in nodes:
                candidate.bring(node)
            return candidate
        except BaseException as error:
            shown = candidate.last_words()
            _end(candidate)
            if attempt == 2 or not isinstance(error, ClusterError) or "in use" not in shown:
                raise
    raise AssertionError("unreachable")


def _end(ended: Cluster) -> None:
    """Stop the daemons, then kill whatever they left running, each by its number."""
    for name in reversed(ended.daemons):
        daemon = ended.daemons[name]
        daemon.send_signal(signal.SIGKILL if name == "slurmctld" else signal.SIGTERM)
    for daemon in ended.daemons.values():
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    ours = {"SLURM_CONF": ended.env["SLURM_CONF"]}
    deadline = time.monotonic() + 60
    while (left := processes.having(ours)) and time.monotonic() < deadline:
        processes.kill(left)
        time.sleep(0.05)
    shutil.rmtree(ended.folder, ignore_errors=True)


def _is_slurm(name: str) -> bool:
    """Tell whether a variable would make a test's job look like a part of another job."""
    return name.startswith(("SLURM", "SBATCH_", "SRUN_", "PMI", "MASTER_"))


def _find(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise ClusterError(
            f"the test cluster needs {program}, which is not installed: "
            "apt-get install slurm-wlm munge"
        )
    return path
