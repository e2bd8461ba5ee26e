"""Generate the tokens after a prompt: run a model step by step, and choose each next token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from training.errors import TrainingError
from training.ops.rope_scaling import BY_LENGTH

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from training.models.language import LanguageModel

AT_ONCE = 1024
"""Tokens of the prompt that are read at once: more need more memory, fewer more time."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    picks: Sequence[Callable[[Tensor], int]],
    ends: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, `count` times or until all have ended.

    The prompts have the same length. Each token is picked from the logits (v,) before it; from a
    token in `ends` on, a prompt's are None. The states are those of LanguageModel.start; for Mamba,
    they have the same size for any length.
    """
    import torch

    device, length = model.output.device, len(prompts[0])
    states = model.start(len(prompts), length + count)
    # Angles that depend on the text's length are those for the whole prompt.
    scaling = getattr(model.config, "rope_scaling", None)
    step = length if scaling is not None and scaling.kind in BY_LENGTH else AT_ONCE
    for at in range(0, length, step):
        ids = torch.tensor([one[at : at + step] for one in prompts], device=device)  # (b, l)
        logits = model.advance(ids, states)  # (b, v)
    running = [True] * len(prompts)
    for made in range(1, count + 1):
        tokens: list[int | None] = [
            pick(row) if goes_on else None
            for pick, row, goes_on in zip(picks, logits, running, strict=True)
        ]
        running = [token is not None and token not in ends for token in tokens]
        tokens = [token if on else None for token, on in zip(tokens, running, strict=True)]
        if not any(running):
            return
        yield tokens
        if made < count:
            # What follows a text that has ended is never shown.
            following = [[token or 0] for token in tokens]
            logits = model.advance(torch.tensor(following, device=device), states)  # (b, v)


def picker(
    size: int, temperature: float, top_k: int, top_p: float, random: Generator
) -> Callable[[Tensor], int]:
    """Make a function that picks the next token from logits (v,), the first `size` being tokens.

    temperature 0: the most likely token. Else a draw from softmax(logits / temperature) among the
    top_k most likely tokens (0: all), and of these the fewest that together have top_p (Holtzman et
    al. 2020, section 3.1). The function raises TrainingError if the logits are not finite.
    """
    import torch

    def pick(logits: Tensor) -> int:
        dtype = logits.dtype
        logits = logits[:size].float().cpu()  # (v,), drawn on the CPU: alike on all devices
        if not torch.isfinite(logits).all():
            kind = str(dtype).removeprefix("torch.")
            raise TrainingError(
                f"the model gives logits that are not finite, computed in {kind}; fix: try another "
                f"--dtype; if that changes nothing, its weights are bad"
            )
        if temperature < torch.finfo(torch.float32).tiny:  # 0, or what may become 0 in float32
            return int(logits.argmax())
        # The largest becomes 0, so that no temperature, however small, overflows.
        logits = (logits - logits.max()) / temperature  # (v,)
        values, tokens = logits.sort(descending=True, stable=True)  # (v,) each
        if top_k:
            values = values[:top_k]  # (k,)
        chances = torch.softmax(values, dim=0)  # (k,)
        # A token stays if those before it have less than top_p, so the first always does.
        stays = chances.cumsum(0) - chances < top_p  # (k,)
        stays[0] = True
        drawn = torch.multinomial(chances * stays, 1, generator=random)  # (1,)
        return int(tokens[drawn])

    return pick
