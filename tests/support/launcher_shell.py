"""A login node's shell for launchers; stand-ins for srun and scontrol record their calls."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TOOLS = (
    *(
        "awk",
        "bash",
        "cat",
        "cp",
        "dd",
        "df",
        "dirname",
        "grep",
        "head",
        "id",
        "mkdir",
        "od",
        "paste",
        "realpath",
        "rm",
    ),
    *("sed", "sleep", "sort", "stat", "tail", "touch", "uname"),
)
# An empty squash file: its magic, and a superblock that says that it has 48 bytes.
NOTHING = b"hsqs" + bytes(36) + (48).to_bytes(8, "little")

# The step that checks the nodes runs here, once for each of the two; the one that reads the image
# runs once.
SRUN = """\
#!/bin/bash
if [[ $1 == --help ]]; then cat "$HELP"; exit; fi
if [[ $* == *" check_node "* ]]; then
    while [[ $1 != bash ]]; do shift; done
    eval "${CHECK_MEANWHILE:-}"
    for SLURMD_NODENAME in node-1 node-2; do
        export SLURMD_NODENAME
        "$@"
    done
    exit "${CHECK_CODE:-0}"
fi
if [[ $* == *" warm "* ]]; then
    printf '%s\\n' "$@" > "$CALLED.warm"
    while [[ $1 != bash ]]; do shift; done
    exec "$@"
fi
state=$CHECKPOINTS/.job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
[[ -n ${NOT_STARTED:-} ]] || touch "$state/started.0"
eval "${MEANWHILE:-}"
printf '%s\\n' "$@" > "$CALLED"
cp -r "$state" "$CALLED.state"
exit "$SRUN_CODE"
"""
SCONTROL = """\
#!/bin/bash
case "$1 $2" in
"show hostnames") printf '%s\\n' node-1 node-2 ;;
"show node") echo "NodeName=node-1 Arch=x86_64 NodeAddr=10.0.0.5 NodeHostName=node-1" ;;
"show config") echo "PlugStackConfig         = ${PLUGSTACK:-/none}" ;;
"show job") echo "JobId=7 JobName=x JobState=${JOB_STATE:-RUNNING} Reason=None" \
    "Restarts=${SLURM_RESTART_COUNT:-0} ExcNodeList=(null)" ;;
*) echo "$*" >> "$CALLED.scontrol" ;;
esac
"""


class Shell:
    """A folder to submit from, with an image, and the programs on the PATH."""

    def __init__(self, folder: Path, launcher: Path) -> None:
        self.folder, self.launcher, self.called = folder, launcher, folder / "called"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for tool in TOOLS:  # and no others, to hide any runtime of this machine
            self.tool(tool)
        self.program("srun", SRUN)
        self.program("scontrol", SCONTROL)
        self.program("date", "#!/bin/bash\necho 1700000000\n")
        self.help = folder / "help"
        self.help.write_text("  -N, --nodes=N   number of nodes\n")
        self.image = folder / "build" / "cpu-mamba.sqsh"
        self.image.parent.mkdir()
        self.image.write_bytes(NOTHING)
        (folder / "x.py").touch()
        (folder / "config.yaml").touch()
        self.log: int | IO[str] = subprocess.PIPE

    def program(self, name: str, text: str = "#!/bin/bash\n") -> None:
        path = self.programs / name
        path.unlink(missing_ok=True)  # a link to this machine's tool
        path.write_text(text)
        path.chmod(0o755)

    def enroot(self) -> None:
        """Install an enroot that starts, and prints its arguments."""
        self.program("squashfuse")
        self.program("enroot", "#!/bin/bash\nprintf '%s\\n' \"$@\"\n")

    def tool(self, name: str) -> None:
        (self.programs / name).symlink_to(str(shutil.which(name)))

    @property
    def state(self) -> Path:
        """The contents of the start's folder while srun ran."""
        return self.called.with_name("called.state")

    def run(self, *flags: str, become: Sequence[str] = (), **env: str) -> tuple[int, str]:
        """Run the script in the folder; returns its exit code and output, unless logged elsewhere.

        It is a trial, unless the environment says otherwise.
        """
        shutil.rmtree(self.state, ignore_errors=True)
        done = subprocess.run(
            [*become, "bash", str(self.launcher), *flags],
            env={
                "PATH": str(self.programs),
                "HELP": str(self.help),
                "CALLED": str(self.called),
                "SRUN_CODE": "0",
                "TRIAL": "1",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "node-[1-2]",
                "SLURM_JOB_NUM_NODES": "2",
                **env,
            },
            cwd=self.folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def srun(self, *flags: str, **env: str) -> list[str]:
        """Run the script and return the words that `srun` was called with."""
        code, said = self.run(*flags, **env)
        assert code == 0, said
        return self.called.read_text().splitlines()
