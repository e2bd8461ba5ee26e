"""`sqshforge doctor --cluster` on a real Slurm, whose second node has every fault it reports.

All faults lie in the mounts, limits and programs of that node alone. An ordinary user runs the
doctor.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.ordinary_user import opened
from tests.support.slurm import FUSE, USER, Cluster, cluster

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SETTINGS = (
    "PropagateResourceLimitsExcept=MEMLOCK",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=spot Nodes=ALL GraceTime=60 PreemptMode=REQUEUE",
)
# Each node's own enroot: a shell script that names its configuration file, and makes its folders at
# each call, as the real one does.
ENROOT = """
mkdir -p {local}/bin {local}/enroot {local}/odd
cat > {local}/bin/enroot << 'END'
#!/bin/bash
config::init() {{ :; }}
config::init "{local}/enroot/enroot.conf"
mkdir -p "$ENROOT_RUNTIME_PATH" "$ENROOT_CACHE_PATH" "$ENROOT_DATA_PATH" && echo {version}
END
chmod 0755 {local} {local}/bin/enroot
chmod 1777 {local}/enroot
"""
FINE = "echo 'ENROOT_RUNTIME_PATH {local}/enroot/user-$(id -u)' > {local}/enroot/enroot.conf;"
CONTAINERS = """
cat > {local}/odd/srun << 'END'
#!/bin/sh
echo "      --container-image=PATH"
END
chmod 0755 {local}/odd/srun
"""
# The order matters: first the overlays on /etc and /dev, then what lies in them.
FAULTS = """
mkdir -p {local}/etc/upper/needrestart {local}/etc/work {local}/dev/upper {local}/dev/work
echo '$nrconf{{restart}} = "a";' > {local}/etc/upper/needrestart/needrestart.conf
overlay() {{ mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" overlay "$2"; }}
overlay {local}/etc /etc
{knows_user}
mknod -m 0666 {local}/dev/upper/nvidia0 c 1 3
overlay {local}/dev /dev
{fuse}
chmod 0600 /dev/fuse
mount --bind /dev/null /usr/bin/squashfuse
mount --bind /dev/null /usr/bin/unsquashfs
mount -t tmpfs none {folder}/shared
echo other > {local}/other
mount --bind {local}/other {folder}/a.sqsh
cat > {local}/bin/python3 << 'END'
#!/bin/sh
# Its clock is 90 s ahead: python3 -I -c PROGRAM WORDS.
program=$3
shift 3
exec {python} -I -c "import time
real = time.time
time.time = lambda: real() + 90
$program" "$@"
END
chmod 0755 {local}/bin/python3
ulimit -l 64
mkdir {local}/root
mount --rbind / {local}/root
exec chroot {local}/root "$0" "$@"
"""
# The lines that report the faults.
SHOWN = r"""
MISSING n2      unsquashfs \(reads an image\): not found
-       n1      enroot: 4.1.2, .*; not as on n2
-       n2      enroot: 3.4.1, .*; not as on n1
MISSING n2      ENROOT_RUNTIME_PATH: /run/enroot .*not writable for uid 41236
MISSING n2      /dev/fuse .*: not open to uid 41236: Permission denied \(mode 0600\)
MISSING n2      squashfuse \(mounts an image\): not found
MISSING n2      user namespaces: not allowed: .*Operation not permitted
-       n2      NVIDIA GPUs: 1; not as on n1
MISSING n2      nvidia-container-cli .*: not found
MISSING n2      enroot's hook for GPUs: .*/hooks.d/98-nvidia.sh is not there, or not executable
-       n2      needrestart: restarts daemons after an update, below a job too: .* is 'a'
-       n2      limit on locked memory: at most 64 KiB
MISSING n2      folder .*/shared: a file that was made here is not read there: No such file .*
MISSING n2      image .*/a.sqsh: another file, of 6 bytes
MISSING n2      clock: 1 min (29|30) s ahead of the others
-       slurm   KillWait: 20 s between SIGTERM and SIGKILL, in which a cancelled job can save
-       slurm   preemption: on, with GraceTime \(partition spot\); SIGTERM goes to every process .*
ok      n1      clock: the same, known to .*
ok      n1      folder .*/shared: the same
ok      n1      image .*/a.sqsh: the first 3 MiB in .*
ok      n1      user namespaces: allowed
ok      n\[1-2\]  container runtime: launchers take enroot
"""


@dataclass(frozen=True)
class Login:
    """A login node of the cluster, used by an ordinary user."""

    slurm: Cluster
    place: Path  # holds what its mounts need

    @property
    def shared(self) -> Path:
        return self.slurm.folder / "shared"

    @property
    def image(self) -> Path:
        return self.slurm.folder / "a.sqsh"

    def argv(self, *words: str | Path, by: Sequence[str] = ()) -> list[str]:
        script = f'set -e\n{opened()}\n{self.slurm.knows_user}\nexec "$@"'
        become = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        asked = (sys.executable, "-m", "sqshforge", "doctor", "--cluster", *words)
        entered = ("unshare", "--mount", "sh", "-c", script, self.place)
        return [str(word) for word in (*entered, *become, *by, *asked)]

    def env(self, first: str = "") -> dict[str, str]:
        """Return the user's variables; folders local to each node come first on the PATH."""
        folders = [f"{self.slurm.local}/{name}" for name in (first, "bin") if name]
        return {
            "HOME": str(self.slurm.folder / "home"),
            "PATH": ":".join([*folders, PATH]),
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": self.slurm.env["SLURM_CONF"],
        }

    def doctor(
        self, *words: str | Path, first: str = "", by: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run the doctor as the user, in the shared folder."""
        return subprocess.run(
            self.argv(*words, by=by),
            env=self.env(first),
            cwd=self.shared,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def jobs(self) -> list[str]:
        """Return the doctor's jobs that Slurm knows."""
        listed = self.slurm.ask("squeue", "--noheader", "--format=%j %T").splitlines()
        return [line for line in listed if line.startswith("sqshforge-doctor")]


def planted(script: str, **values: str) -> Callable[[Cluster], str]:
    """Return shell lines for a node of a cluster, which stop as soon as one of them fails."""

    def lines(slurm: Cluster) -> str:
        for name in ("home", "shared"):
            (slurm.folder / name).mkdir(exist_ok=True)
            os.chown(slurm.folder / name, USER, USER)
        if not (slurm.folder / "a.sqsh").exists():
            (slurm.folder / "a.sqsh").write_bytes(os.urandom(3 << 20))
        where = {"folder": slurm.folder, "local": slurm.local, "knows_user": slurm.knows_user}
        return f"set -e\n{script.format(**where, **values)}\n"

    return lines


@pytest.fixture(scope="module")
def login() -> Iterator[Login]:
    python = shutil.which("python3", path=PATH)
    assert python, "the nodes have no python3"
    odd = {
        "n1": planted(ENROOT + FINE, version="4.1.2"),
        "n2": planted(ENROOT + CONTAINERS + FAULTS, version="3.4.1", python=python, fuse=FUSE),
    }
    place = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    try:
        with cluster(kill_wait=20, apart=True, settings=SETTINGS, planted=odd) as slurm:
            yield Login(slurm, place)
    finally:
        shutil.rmtree(place)


def require_rows(said: str, shown: str) -> None:
    """Check that every wanted line was printed, and that a fix follows each missing thing."""
    lines = said.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    lacking = [
        wanted
        for wanted in shown.strip().splitlines()
        if not any(re.fullmatch(" ".join(wanted.split()), row) for row in rows)
    ]
    assert not lacking, "\n".join([*lacking, "", said])
    for line, following in itertools.pairwise(lines):
        if line.startswith("MISSING"):
            assert following.startswith("          fix: "), said


def test_every_fault_of_the_second_node_is_reported(login: Login) -> None:
    done = login.doctor("--image", login.image)
    assert done.returncode == 3, done.stdout + done.stderr
    require_rows(done.stdout, SHOWN)
    missing = [line for line in done.stdout.splitlines() if line.startswith("MISSING")]
    assert len(missing) == 10 and all(line.split()[1] == "n2" for line in missing), done.stdout
    assert done.stdout.splitlines()[-1] == "10 missing"
    assert list(login.shared.iterdir()) == [] and login.jobs() == []


def test_a_node_where_nothing_is_wrong(login: Login) -> None:
    done = login.doctor("--nodes=1", "--image", login.image)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "looked at n1 of partition all in " in done.stdout
    assert "not looked at, idle: n2" in done.stdout and "MISSING" not in done.stdout
    assert re.search(r"ENROOT_RUNTIME_PATH: .*/user-41236, to be made, on tmpfs", done.stdout)
    shown = done.stdout.splitlines()[-1]
    assert shown.startswith(f"next: TRIAL=1 IMAGE={login.image} sbatch --nodes=1 ")


def test_another_runtime_and_an_image_that_cannot_be_read(login: Login) -> None:
    pipe = login.slurm.folder / "pipe"
    os.mkfifo(pipe)
    done = login.doctor("--timeout=45", "--image", pipe, first="odd")
    assert done.returncode == 3, done.stdout + done.stderr
    require_rows(
        done.stdout,
        r"""
ok      n2      container runtime: launchers take pyxis
MISSING n1      container runtime: launchers take enroot, but pyxis where the first .* is of n2
ok      n2      pyxis: of unknown version; each start unpacks the image .*
MISSING n\[1-2\]  image .*/pipe: not read: no answer within 15 s
""",
    )


def test_a_node_that_does_not_answer_is_named(login: Login) -> None:
    slow = "#!/bin/sh\nexec sleep 1000\n"
    within(login.slurm, f"mkdir {login.slurm.local}/slow")
    within(login.slurm, f"cat > {login.slurm.local}/slow/python3", slow)
    within(login.slurm, f"chmod 0755 {login.slurm.local}/slow/python3")
    done = login.doctor("--timeout=30", first="slow")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "looked at n1 of partition all" in done.stdout
    assert "error: 1 of 2 nodes did not answer within 30 s: n2" in done.stderr
    login.slurm.until(lambda: not login.jobs(), 120, "the job stays")
    login.slurm.until(lambda: login.slurm.is_idle("n2"), 120, "n2 stays busy")


def test_a_node_without_python_is_reported(login: Login) -> None:
    hidden = [f"{login.slurm.local}/bin/python3"]
    hidden += [str(path.resolve()) for path in pythons()]
    for path in hidden:
        within(login.slurm, f"mount --bind /dev/null {path}")
    try:
        done = login.doctor()
    finally:
        for path in hidden:
            within(login.slurm, f"umount {path}")
    assert done.returncode == 3, done.stdout + done.stderr
    require_rows(done.stdout, "MISSING n2      python3: not there: nothing else was seen")


def pythons() -> list[Path]:
    found = (shutil.which("python3", path=folder) for folder in PATH.split(":"))
    return [Path(path) for path in dict.fromkeys(found) if path]


def within(slurm: Cluster, script: str, text: str = "") -> None:
    """Run a script as root in the second node's mounts."""
    target = str(slurm.daemons["n2"].pid)
    words = ["nsenter", "--target", target, "--mount", "--root", "sh", "-c", script]
    subprocess.run(words, input=text, text=True, check=True)


def test_one_that_is_ended_while_it_waits_leaves_no_job(login: Login) -> None:
    slurm = login.slurm
    other = slurm.submit("--nodes=2", "--exclusive", "--wrap", "sleep 1000")
    slurm.until(lambda: slurm.state(other) == "RUNNING", 120, "the other job does not start")
    refused = login.doctor()
    assert refused.returncode == 3 and "where: n1: alloc, n2: alloc" in refused.stderr
    with subprocess.Popen(
        login.argv("--nodes=2"),
        env=login.env(),
        cwd=login.shared,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            slurm.until(lambda: "PENDING" in "".join(login.jobs()), 120, "no job waits")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert login.jobs() == [] and list(login.shared.iterdir()) == []
    slurm.cancel(other)
    slurm.wait(other)


def test_within_a_job_its_own_nodes_are_looked_at(login: Login) -> None:
    done = login.doctor(by=["salloc", "--nodes=2", "--quiet"])
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("looked at n[1-2] in "), done.stdout + done.stderr
