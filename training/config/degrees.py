"""Which degrees of tensor and context parallelism fit a model, its ranks and this torch.

No torch here, so that an impossible request is refused before any rank starts.
"""

from __future__ import annotations

from training.models.hybrid_sizes import ATTENTION, MAMBA, GraniteHybridConfig, HybridConfig
from training.models.sizes import LlamaConfig, Mamba2Config, MambaConfig, NeoXConfig, Sizes


def faults(sizes: Sizes, degree: int, engine: str, compiled: bool) -> list[str]:
    """List why `degree` ranks cannot share the layers of a model."""
    if degree <= 1:
        return []
    if not isinstance(sizes, LlamaConfig | Mamba2Config | HybridConfig):
        return [
            f"tensor_parallel: {degree} ranks cannot share a layer of {sizes.family}, "
            "only those of llama, mistral, mixtral, mamba2 and the hybrids of mamba2"
        ]
    found = [
        f"tensor_parallel: {degree} ranks cannot share {value} {what} ({name}) evenly"
        for name, what, value in _shared(sizes)
        if value % degree
    ]
    groups = _groups(sizes)
    if groups % degree and degree % groups:
        found.append(
            f"tensor_parallel: {degree} ranks need a multiple of {degree} groups, or a number "
            f"that divides {degree}, not {groups} (n_groups)"
        )
    if engine == "fsdp1":
        found.append("tensor_parallel: works with FSDP2 only; fix: use fsdp_engine=auto or fsdp2")
    if compiled:
        found.append(
            "tensor_parallel: its blocks cannot be compiled; fix: leave out use_torch_compile"
        )
    return found


def neuron_faults(sizes: Sizes, degree: int) -> list[str]:
    """List why the Neuron backend cannot share a model out to `degree` ranks."""
    if not isinstance(sizes, Mamba2Config):
        return [f"backend: neuron has mamba2 only, not {sizes.family}"]
    if degree < 1:
        return []
    shared = (
        *_shared(sizes)[:1],
        ("n_groups", "groups", sizes.n_groups),
        ("vocab_size", "words of the vocabulary", sizes.vocab_size),
    )
    return [
        f"tensor_parallel: {degree} ranks cannot share {value} {what} ({name}) evenly"
        for name, what, value in shared
        if value % degree
    ]


def context_faults(sizes: Sizes, degree: int, length: int, *, compiled: bool) -> list[str]:
    """List why `degree` ranks cannot each have a piece of every sequence of `length` tokens."""
    if degree <= 1:
        return []
    found = []
    least = max(1, _taps(sizes) - 1)
    if length // degree < least:
        found.append(
            f"context_parallel: pieces of {length // degree} tokens (seq_length {length} / "
            f"{degree}) are too short, each needs {least}; fix: make context_parallel smaller"
        )
    if isinstance(sizes, NeoXConfig) and sizes.attention_dropout:
        found.append(
            "context_parallel: attention over several ranks has no dropout; fix: use a model with "
            "attention_dropout 0"
        )
    if compiled:
        found.append(
            "context_parallel: its blocks cannot be compiled; fix: leave out use_torch_compile"
        )
    return found


def _taps(sizes: Sizes) -> int:
    """Count the taps of a model's convolution; 0 if it has none."""
    return sizes.d_conv if isinstance(sizes, MambaConfig | Mamba2Config | HybridConfig) else 0


def world_faults(degree: int, ranks: int, has_fsdp2: bool, context: int = 1) -> list[str]:
    """List why these ranks cannot be cut into groups that share layers, or sequences."""
    found = []
    if ranks % degree:
        found.append(f"tensor_parallel: {ranks} ranks cannot be cut into groups of {degree}")
    elif ranks // degree % context:
        whole = f"{ranks} ranks" if degree == 1 else f"{ranks // degree} tensor groups"
        found.append(f"context_parallel: {whole} cannot be cut into groups of {context}")
    if degree > 1 and not has_fsdp2:
        found.append("tensor_parallel: works with FSDP2 only, which this torch does not have")
    return found


def copy_faults(ranks: int, shared: int) -> list[str]:
    """List why these ranks cannot be cut into groups that share a copy of the model."""
    if ranks % shared == 0:
        return []
    return [f"shard_group_size: {ranks} ranks cannot be cut into groups of {shared}"]


def warnings(degree: int, ranks_of_node: int) -> list[str]:
    """Return warnings of what is possible but slow."""
    if ranks_of_node % degree == 0:
        return []
    return [
        f"tensor_parallel: groups of {degree} ranks span nodes, which have {ranks_of_node}; "
        "every layer then waits for the network"
    ]


def _shared(sizes: LlamaConfig | Mamba2Config | HybridConfig) -> list[tuple[str, str, int]]:
    """List what is divided: the name of the size, what it counts, and its value."""
    if isinstance(sizes, HybridConfig):
        return _shared_of_hybrid(sizes)
    if isinstance(sizes, Mamba2Config):
        return [
            ("d_inner / head_dim", "heads", sizes.n_head),
            ("d_model", "columns of in_proj", sizes.d_model),
        ]
    return [
        ("n_head", "heads of queries", sizes.n_head),
        ("n_kv_head", "heads of keys and values", sizes.n_kv_head),
        ("d_ff", "channels of the MLP", sizes.d_ff),
    ]


def _groups(sizes: Sizes) -> int:
    """Count the groups of Mamba-2's heads; 1, which fits all degrees, if there are no heads."""
    if isinstance(sizes, Mamba2Config):
        return sizes.n_groups
    return sizes.n_groups if isinstance(sizes, HybridConfig) and MAMBA in sizes.pattern else 1


def _shared_of_hybrid(sizes: HybridConfig) -> list[tuple[str, str, int]]:
    found = []
    if MAMBA in sizes.pattern:
        found += [
            ("n_mamba_head", "heads of Mamba-2", sizes.n_mamba_head),
            ("d_model", "columns of in_proj", sizes.d_model),
        ]
    if ATTENTION in sizes.pattern:
        found += _shared(sizes.attention)[:2]
    found += [("d_ff", "channels of the MLP", sizes.d_ff)]
    if isinstance(sizes, GraniteHybridConfig) and sizes.n_expert:
        found += [("d_expert", "channels of an expert", sizes.d_expert)]
    return found
