"""A worker process of a node: tests one device, alone and with the other workers.

    python3 -m training.job.preflight.worker LOCAL_RANK DESCRIPTOR

It reads orders from standard input, one JSON object per line, and writes the answer to each to the
open file descriptor DESCRIPTOR, with `fault` if something is wrong; standard output is left to the
libraries. It exits when standard input ends, whatever it is doing: the node's main process is gone
then, and the device must be free.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from training.cli import Parser
from training.imports import loading

with loading():
    import torch
    import torch.distributed as dist

SIZE = 1 << 20
"""Elements of the all-reduce, 4 MiB: enough for every channel of NCCL to have work."""

SIDE = {"cuda": 4096, "cpu": 256}  # rows and columns of the matrices
HELD = 1 << 30
"""Bytes of GPU memory that are allocated and written."""


def main(local_rank: int, descriptor: int) -> None:
    """Carry out orders until standard input ends."""
    answers = os.fdopen(descriptor, "w")
    orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    tasks: dict[str, Callable[..., dict[str, Any]]] = {
        "probe": probe,
        "reduce": reduce,
        "ready": ready,
    }
    while True:
        order = orders.get()
        try:
            answer = tasks[order.pop("do")](local_rank, **order)
        except Exception as error:
            # What NCCL has not finished may hang the next call: the process is of no more use.
            answer = {"fault": brief(error), "spent": torch.cuda.is_initialized()}
        print(json.dumps(answer), file=answers, flush=True)


def probe(local_rank: int) -> dict[str, Any]:
    """Use the device: allocate memory, and multiply matrices whose product is known."""
    device = _device(local_rank)
    found = {
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "accelerator": "cpu",
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if local_rank >= torch.cuda.device_count():
            return {**found, "fault": f"there is no GPU for it: torch sees {found['devices']}"}
        torch.cuda.set_device(device)
        torch.full((HELD // 4,), 1.0, device=device)
        torch.cuda.synchronize()
    fault = multiply(device)
    return {**found, "fault": fault} if fault else found


def ready(local_rank: int) -> dict[str, Any]:
    """Answer, which shows that torch is loaded."""
    return {}


def multiply(device: torch.device) -> str:
    """Compare a matrix product's row sums with integer ones of the CPU; return the fault, or "".

    The numbers are whole and small, and so exact in TF32 too: this tries the tensor cores.
    """
    side = SIDE[device.type]
    torch.backends.cuda.matmul.allow_tf32 = True
    generator = torch.Generator().manual_seed(side)
    left, right = (torch.randint(0, 7, (side, side), generator=generator) for _ in range(2))
    product = left.to(device, torch.float32) @ right.to(device, torch.float32)  # (side, side)
    ones = torch.ones(side, dtype=torch.int64)
    wanted = left @ (right @ ones)  # (side,), the sums of the product's rows
    wrong = int((product.to("cpu", torch.int64).sum(1) != wanted).sum())
    return f"{wrong} of {side} rows of a matrix product are wrong" if wrong else ""


def reduce(
    local_rank: int, *, store: list[Any], name: str, rank: int, world: int, seconds: float
) -> dict[str, Any]:
    """Sum a contribution of each of `world` processes, and compare with the known sum.

    `store` is where they meet: [FILE] on one node, or [ADDRESS, PORT]; `name` identifies this
    meeting. Meeting takes at most `seconds`, and so does the sum, unless a library hangs.
    """
    device = _device(local_rank)
    limit = timedelta(seconds=seconds)
    meeting: Any
    if len(store) == 1:
        meeting = dist.FileStore(store[0], world)
    else:
        meeting = dist.TCPStore(store[0], store[1], None, False, timeout=limit)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(name, meeting),
        rank=rank,
        world_size=world,
        timeout=limit,
    )
    try:
        value = contribution(rank).to(device)  # (SIZE,)
        dist.all_reduce(value)
        # Whole numbers are exact in fp32 below 2^24, which is enough for 5,700 processes.
        wanted = pattern() * world + world * (world + 1) // 2
        wrong = int((value.cpu() != wanted).sum())
    finally:
        dist.destroy_process_group()
    return {"fault": f"{wrong} of {SIZE} elements of the sum are wrong"} if wrong else {}


def contribution(rank: int) -> torch.Tensor:
    """What a process adds to the sum, (SIZE,): the pattern plus its rank + 1."""
    return pattern() + (rank + 1)


def pattern() -> torch.Tensor:
    """Small whole numbers, (SIZE,), so that misplaced elements show."""
    return torch.arange(SIZE, dtype=torch.float32) % 7


def brief(error: Exception) -> str:
    """The first and last line of an error: libraries put a stack between them."""
    text = re.sub(r"\[/\S+\] ?", "", str(error))  # positions in their sources
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[:1] + lines[1:][-1:] or [type(error).__name__]
    return " ... ".join(line[:200] for line in said)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def _listen(orders: SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    parser = Parser("python3 -m training.job.preflight.worker", str(__doc__))
    parser.add_argument("rank", type=int, metavar="LOCAL_RANK", help="which device to use")
    parser.add_argument("file", type=int, metavar="DESCRIPTOR", help="open file for answers")
    given = parser.parse_args()
    main(given.rank, given.file)
