"""Every number that the models take, once: its value, its unit, and where it is from.

A source begins with `measured` (here, by what), `published` (publisher and place), `chosen` (by
this project) or `assumed`. Times were measured on two processors that other work shared; those of a
node are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.checkpoint import interval

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True)
class Fact:
    """A number, in SI units."""

    value: float
    unit: str
    source: str


NODES = (8, 64, 512, 4096)
MEETINGS = (8, 64, 512, 1024, 4096)
"""Nodes whose meeting is looked at."""

# The machines: p5.48xlarge nodes, and one file system that does not grow with the job.
GPUS = Fact(8, "GPUs a node", "published: AWS, p5.48xlarge")
PEAK = Fact(989e12, "FLOP/s a GPU", "published: NVIDIA, H100 SXM, bf16 without sparsity")
MFU = Fact(0.4, "of the peak", "assumed")
FILE_SYSTEM = Fact(96, "TiB", "assumed: FSx for Lustre, Persistent 2, 1000 MB/s a TiB, EFA")
SERVER = Fact(4.8, "TiB a file server", "published: AWS, FSx for Lustre, of that kind")
NETWORK = Fact(2.6e9, "bytes/s a TiB", "published: AWS, FSx for Lustre, reads from its memory")
DISK = Fact(1.0e9, "bytes/s a TiB", "published: AWS, FSx for Lustre, its disks")
CLIENT = Fact(12.5e9, "bytes/s a node", "published: AWS, FSx for Lustre: 100 Gbit/s a client (ENA)")
CLIENT_SERVER = Fact(
    0.625e9,
    "bytes/s",
    "published: AWS, FSx for Lustre: 5 Gbit/s between a client and a server (ENA)",
)
STRIPES = Fact(
    8, "servers", "published: AWS, FSx for Lustre, default layout of files of 0.1 to 10 GB"
)
METADATA = Fact(12_000, "operations/s", "assumed; FSx for Lustre sells 1,500 to 192,000")
NODE_DISK = Fact(2e9, "bytes/s", "assumed: one NVMe disk of the node")
FLOW = Fact(1.25e9, "bytes/s", "published: AWS, EC2: 10 Gbit/s a TCP flow in a placement group")

# The image, and how it comes to a node.
IMAGE = Fact(2.9e9, "bytes", "estimated: cuda13-mamba, profile shared (docs/images/targets)")
MOUNTED = Fact(
    0.36,
    "of the file",
    "measured: of 467 MB of cpu-mamba.sqsh a start of training asks the server for 167 MB with it "
    "mounted by the kernel, files in folder order, for 145 MB by squashfuse "
    "(docs/background/cold-start.md)",
)
MOUNT_READ = Fact(2**20, "bytes", "assumed: one block of profile shared at a time")
MOUNT_WAIT = Fact(1e-3, "s", "assumed: a read's latency")
SPREAD = Fact(2.0, "s", "assumed: the last node starts its container so much after the first")
BLOCK = Fact(8 * 2**20, "bytes", "published: Slurm 22.05, sbcast(1), --size")
FANOUT = Fact(8, "nodes", "published: Slurm 22.05, sbcast(1): at most 8")
HOP = Fact(2e-3, "s", "assumed: a message between two slurmd, its credential checked")
JITTER = Fact(0.5, "", "assumed: standard deviation of the logarithm of a hop's time")

# The run that is kept: Llama 2 of 70 billion parameters.
PARAMETERS = Fact(70e9, "", "assumed: the model")
TENSORS = Fact(723, "", "published: Llama 2 70B: 80 blocks of 9 tensors, and 3")
STATE = Fact(
    12,
    "bytes a parameter",
    "measured: weights and two moments in fp32 (docs/training/checkpoints.md)",
)
NODE_WRITE = Fact(5e9, "bytes/s a node", "assumed: files written and synced by 8 processes")
CHECKSUM = Fact(
    2e9, "bytes/s a rank", "measured: 0.78 GB in 0.2 to 0.45 s (docs/training/checkpoints.md)"
)
COPY = Fact(20e9, "bytes/s a GPU", "assumed: into pinned memory, PCIe 5 x16")
ENTRY = Fact(143, "bytes", "measured: an entry of .metadata, torch 2.13")
ENTRY_TIME = Fact(21e-6, "s", "measured: an entry of .metadata is packed (pickle), torch 2.13")

# Failures, and starting again.
NODE_MTBF = Fact(
    interval.NODE_MTBF,
    "s",
    "published: Llama 3 (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54 days "
    "on 16,384 GPUs, 8 a node",
)
NODE_MTBF_WORST = Fact(
    60 * DAY * 124 / (35 + 70),
    "s",
    "published: OPT (arXiv 2205.01068), section 2.5: 35 manual and some 70 automatic restarts "
    "in 2 months on 992 GPUs, 8 a node",
)
NODE_MTBF_BEST = Fact(
    1000 / 2.34 * DAY,
    "s",
    "published: Kokolis et al. (arXiv 2410.21680): 2.34 failures in 1,000 node-days on the better "
    "of two clusters, 6.50 on the other",
)
DETECTION = Fact(
    60, "s", "assumed: a node is dead; a rank that hangs takes hang_abort_seconds, 600"
)
REQUEUE = Fact(120, "s", "measured: Slurm 22.05 holds a requeued job back (launch/README.md)")
START = Fact(60, "s", "assumed: container, imports, first step, without what is listed apart")
PROCESS = Fact(
    61 / 419,
    "of all failures",
    "published: Llama 3, table 5: 54 software bugs and 7 timeouts of NCCL's watch, whose nodes are "
    "sound",
)
IN_PLACE = Fact(
    40, "s", "assumed: ranks seen to fail and ended (5 s), met again, imports, first step"
)

# Where processes meet.
TURN = Fact(0.2e-3, "s", "assumed: a message to another node and its answer")
REQUEST = Fact(20e-6, "s", "measured: a request at torch's TCPStore, torch 2.13")
STORE = Fact(1e9, "bytes/s", "measured: compare_set of 10 to 100 kB at torch's TCPStore")
PARTICIPANT = Fact(92, "bytes", "measured: a node in the state of torchrun's c10d rendezvous")
PICKLE = Fact(5.5e-6, "s", "measured: reading and writing that state, a node in it, Python 3.11")
POLL = Fact(1.0, "s", "published: torch 2.13, dynamic_rendezvous.py, _delay and cache_duration")
BEAT = Fact(5.0, "s", "published: torch 2.13, dynamic_rendezvous.py, keep_alive_interval")
EXPIRY = Fact(15.0, "s", "published: the same, keep_alive_max_attempt (3) of them")
JOIN = Fact(900.0, "s", "chosen: TIMEOUT of training.job.rendezvous")
ARRIVAL = Fact(30.0, "s", "assumed: the last node comes so much after the first")
GLOO = Fact(154, "bytes", "measured: a rank's addresses for gloo, and 8 a rank; torch 2.13")

# Data.
SEQUENCE = Fact(4096, "tokens", "chosen: the default of seq_length")
TOKEN = Fact(4, "bytes", "measured: a packed token")
READ_AHEAD = Fact(8 * 2**20, "bytes", "measured: what one read of a map took here (read_ahead_kb)")
READ_AHEAD_USUAL = Fact(128 * 1024, "bytes", "published: Linux, the default of read_ahead_kb")
SET = Fact(4e12, "bytes", "assumed: a trillion packed tokens")
FILES = Fact(1000, "files", "assumed")
OPENS = Fact(2, "opens a file", "measured: what rank 0 opens of each packed file at its start")
KEPT_OPEN = Fact(256, "files a rank", "chosen: OPEN of training.data.files")
SMALL = Fact(1e9, "parameters", "assumed: a small model reads fastest")
