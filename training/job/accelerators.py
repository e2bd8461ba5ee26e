"""Which accelerators a node's processes use: those seen, those expected, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.errors import RequestError
from training.job.machine.devices import named_gpus, parse_cores
from training.job.node import Node
from training.job.types import GIVEN, Decision, count

VISIBLE_GPUS, VISIBLE_CORES = "CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"
CONTAINER = "NVIDIA_VISIBLE_DEVICES"  # the GPUs that a container was given
LNC = "NEURON_LOGICAL_NC_CONFIG"  # how many physical NeuronCores make a logical one


@dataclass(frozen=True, kw_only=True)
class Usable:
    """What a node has for its processes, one for each: GPUs, or logical NeuronCores."""

    kind: str = ""  # cuda or neuron; empty: there are none
    count: int = 0
    why: str = "no GPU"
    places: tuple[int, ...] = ()  # the NUMA node of each; empty: not known
    warnings: tuple[str, ...] = ()


def is_rehearsal(node: Node) -> bool:
    """Tell whether the instance is only named (INSTANCE_TYPE), and none of its devices is seen."""
    return node.type_why == GIVEN and not node.accelerators.seen and not node.efa


def choose_accelerators(node: Node, environment: Mapping[str, str]) -> Usable:
    """Choose the accelerators; looks only at its arguments. Raises RequestError."""
    seen, kind = node.accelerators.seen, node.accelerators.kind
    instance, warnings = node.instance, []
    if instance is not None:
        chips = f"{instance.count} x {instance.chip.name}"
        if is_rehearsal(node):
            seen, kind = instance.count, "neuron" if instance.chip.cores else "cuda"
            warnings.append(f"none of the {chips} of a {node.type} is seen here: all are counted")
        elif seen != instance.count and not _restricted(environment):
            warnings.append(
                f"of the {chips} of a {node.type} /dev shows {seen}: that many are used"
            )
    found = _neuron if kind == "neuron" else _cuda
    return found(node, environment, seen, tuple(warnings))


def count_efa_cards(node: Node) -> tuple[int, tuple[str, ...]]:
    """Count the network cards for EFA; return the number, and warnings."""
    meant = node.instance.fabric.efa if node.instance else 0
    if is_rehearsal(node) or (node.efa is None and not meant):
        return meant, ()
    if node.efa is None:
        cards = f"{count(meant, 'EFA card')} of a {node.type} {'is' if meant == 1 else 'are'}"
        known = f"/sys/class/infiniband does not exist: {cards} taken for granted"
        return meant, (f"{known}; without EFA nodes reach each other by TCP, slowly",)
    if node.efa < meant:
        cards = count(meant, "EFA card")
        return node.efa, (f"of the {cards} of a {node.type}, {node.efa} are seen",)
    return node.efa, ()


def _cuda(
    node: Node, environment: Mapping[str, str], seen: int, warnings: tuple[str, ...]
) -> Usable:
    """Choose GPUs: those that CUDA_VISIBLE_DEVICES names, else all."""
    name = node.instance.chip.name if node.instance else ""
    places, named = node.accelerators.places, environment.get(VISIBLE_GPUS)
    places = places if len(places) == seen else ()
    if named is None:
        why = _many(seen, name) if seen else Usable.why
        kind = "cuda" if seen else ""
        return Usable(kind=kind, count=seen, why=why, places=places, warnings=warnings)
    words = named_gpus(named)
    if not words:
        return Usable(warnings=warnings)
    if len(words) > seen > 0:
        warnings += (f"{VISIBLE_GPUS} names {len(words)} GPUs, but /dev shows {seen}",)
    numbers = [_number(word, node.accelerators.uuids) for word in words]
    known = all(0 <= number < len(places) for number in numbers)
    return Usable(
        kind="cuda",
        count=len(words),
        why=f"{_many(len(words), name)}, named by {VISIBLE_GPUS}",
        places=tuple(places[number] for number in numbers) if known else (),
        warnings=warnings,
    )


def _neuron(
    node: Node, environment: Mapping[str, str], seen: int, warnings: tuple[str, ...]
) -> Usable:
    """Choose logical NeuronCores: those that NEURON_RT_VISIBLE_CORES names, else all."""
    chip = node.instance.chip if node.instance else None
    physical = node.accelerators.cores or (chip.cores if chip else 0) or 2
    text = environment.get(LNC) or ("2" if physical == 8 else "1")
    if text not in ("1", "2"):
        raise RequestError(f"{LNC}: must be 1 or 2, not {text!r}")
    cores = physical // int(text)  # of a chip
    numbers, why = tuple(range(seen * cores)), _many(seen, chip.name if chip else "Neuron")
    named = environment.get(VISIBLE_CORES)
    if named:
        try:
            numbers = parse_cores(named)
        except ValueError as error:
            raise RequestError(
                f"{VISIBLE_CORES}: must be a list such as 0-3,8, not {named!r}"
            ) from error
    places = node.accelerators.places
    known = len(places) == seen and all(number // cores < seen for number in numbers)
    joined = f" of {text} physical ones" if text != "1" else ""
    return Usable(
        kind="neuron",
        count=len(numbers),
        why=f"named by {VISIBLE_CORES}" if named else f"{why}, {count(cores, 'core')} each{joined}",
        places=tuple(places[number // cores] for number in numbers) if known else (),
        warnings=warnings,
    )


def _many(number: int, name: str) -> str:
    return f"{number} x {name}" if name else count(number, "GPU")


def _restricted(environment: Mapping[str, str]) -> bool:
    """Tell whether processes are meant to see fewer accelerators than the node has."""
    container = environment.get(CONTAINER, "all")
    named = environment.get(VISIBLE_GPUS) or environment.get(VISIBLE_CORES)
    return bool(named) or container not in ("", "all")


def _number(word: str, uuids: tuple[str, ...]) -> int:
    """The number of a GPU, given as a number or as the beginning of its UUID; -1: unknown."""
    if word.isdecimal():
        return int(word)
    found = [number for number, uuid in enumerate(uuids) if uuid and uuid.startswith(word)]
    return found[0] if len(found) == 1 else -1


def describe_machine(node: Node, cards: int) -> list[Decision]:
    """Describe the instance, its accelerators and its network; `cards` counts the EFA cards."""
    why = node.type_why
    if node.instance is None:
        why += "; not in the table: what is seen counts" if node.type else ""
        found = [Decision("instance", node.type or "none of EC2's", why)]
        found += [Decision("EFA", count(cards, "card"), "as seen")] if cards else []
    else:
        chip, fabric = node.instance.chip, node.instance.fabric
        path = "GPUDirect RDMA" if fabric.rdma and not chip.cores else ""
        path = path or ("RDMA" if fabric.rdma else "through the host's memory")
        protocol = f", protocol {fabric.protocol}" if fabric.protocol else ""
        network = f"{fabric.gbits:g} Gbit/s"
        found = [
            Decision("instance", node.type, why),
            Decision(
                "accelerators",
                f"{node.instance.count} x {chip.name}",
                f"{chip.memory / 1024:.0f} GiB each",
            ),
            Decision(
                "EFA",
                count(cards, "card") if cards else "none",
                f"{network}, {path}{protocol}" if cards else f"{network} by TCP",
            ),
        ]
    software = node.software.described()
    return found + ([Decision("software", "for EFA", software)] if cards and software else [])
