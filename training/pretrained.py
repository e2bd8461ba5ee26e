"""A Mamba-2 model with its weights, for use in your own program.

    from training.pretrained import Mamba2ForCausalLM
    model = Mamba2ForCausalLM.from_pretrained("checkpoints/mamba2-130m")

Called like Hugging Face's class, but without its library. Shapes: b batch, l length, v vocabulary
size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.convert.folders import detect
from training.convert.source import Source, load
from training.convert.target import write_model
from training.convert.weights import Held
from training.errors import RequestError
from training.generate.decode import generate, picker
from training.models import Mamba2Config
from training.models.language import LanguageModel
from training.ops.loss import IGNORED


@dataclass
class CausalLMOutput:
    """The result of a call: logits (b, l, v), and the loss () if there were labels."""

    logits: Tensor
    loss: Tensor | None = None


class Mamba2ForCausalLM(nn.Module):
    """Mamba-2; `model` computes, `config` holds its sizes."""

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self._folder = folder

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
    ) -> Mamba2ForCausalLM:
        """Read a folder of any format that training.convert reads, onto the CPU, to evaluate with.

        dtype: to compute in (default: float32, whatever it is stored in). `.train()` and
        `.to(device)` are torch's own. Raises RequestError if it is of another model, or broken.
        """
        place = Path(folder)
        source = Source.open(detect(place), place)
        if not isinstance(source.sizes, Mamba2Config):
            raise RequestError(f"{place} is a model of {source.sizes.family}, not of mamba2")
        model = load(source, torch.device("cpu"), dtype or torch.float32)
        return cls(model.requires_grad_(), source.folder)

    def save_pretrained(self, folder: str | os.PathLike[str], split_proj: bool = True) -> None:
        """Write the current weights, and the tokenizer's files that they came with.

        split_proj: in the Neuron system's layout, else with a single in_proj. Raises RequestError
        if the folder exists, TrainingError if it cannot be written.
        """
        held = {name: one.detach().cpu() for name, one in self.model.named_parameters()}
        source = Source("ours", self._folder, self.config, Held(held))
        write_model(source, "neuron" if split_proj else "neuron-fused", Path(folder), None, None)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        """(b, l) -> logits (b, l, v), and the mean loss of predicting each label from those before.

        labels (b, l) are the tokens themselves; -100 is ignored.
        """
        logits = self.model(input_ids)  # (b, l, v)
        if labels is None:
            return CausalLMOutput(logits)
        before, after = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()  # (b (l - 1), v | )
        return CausalLMOutput(logits, F.cross_entropy(before.float(), after, ignore_index=IGNORED))

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 20,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Tensor:
        """Continue prompts, (b, l) -> (b, l + max_new_tokens).

        Temperature 0 takes the likeliest token; the other settings are training.generate's. Raises
        RequestError for prompts without a token.
        """
        if input_ids.ndim != 2 or not input_ids.numel():
            raise RequestError(
                f"input_ids: must be of shape (prompts, tokens), with at least one token, not "
                f"{tuple(input_ids.shape)}"
            )
        random = torch.Generator().manual_seed(seed)
        pick = picker(self.config.vocab_size, temperature, top_k, top_p, random)
        made = [
            [token for (token,) in generate(self.model, [prompt], max_new_tokens, [pick])]
            for prompt in input_ids.tolist()
        ]
        return torch.cat([input_ids, input_ids.new_tensor(made)], dim=1)  # (b, l + made)
