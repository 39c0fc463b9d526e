"""What fidelity is measured of: a model with simulated quantisation, and exported drafters as boards run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from edge.drafters.cached import CachedDrafter
from tools.export.quantise import rounded
from tools.export.sources import Source

FULL = 16  # bits that stand for "as the source has it": float32 here
HEAD_BITS = 8  # at least, of weights and activations: what no scheme rounds to 4 bits without saying so
CHAIN = 32  # rows a pass of an exported drafter


class Subject(Protocol):
    def logits(self, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
        """What the drafter thinks at each position of `text` [n], all before it given: float32 [n, vocab]."""


@dataclass(frozen=True)
class Scheme:
    """Bits of weights and activations in the products; FULL for none. W4A16 is Scheme(4, 16)."""

    weights: int
    activations: int

    @property
    def name(self) -> str:
        return "16-bit" if self == Scheme(FULL, FULL) else f"W{self.weights}A{self.activations}"


SCHEMES = tuple(Scheme(*bits) for bits in ((FULL, FULL), (8, FULL), (4, FULL), (4, 8), (4, 4), (3, FULL)))


class Simulated:
    """A model in float32 whose weights and activations are rounded to what a scheme could hold.

    Weights in groups along the input with a zero point, embedding and head with HEAD_BITS and without; activations in
    the same groups, each row by itself, by the greatest magnitude. Attention and the cache stay in float32.
    """

    def __init__(self, source: Source, group: int) -> None:
        from transformers import AutoModelForCausalLM

        self._source, self._group = source, group
        self._vocab = source.vocab_size
        self._bits, self._activations = FULL, FULL
        self._model: nn.Module = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
        self._head = self._model.get_output_embeddings()
        self._load(source.weights)
        for module in self._model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._round_input)

    def use(self, scheme: Scheme) -> None:
        """Round from now on as `scheme` does."""
        if scheme.weights != self._bits:
            weights = self._source.weights
            self._load({name: self._rounded(name, tensor, scheme.weights) for name, tensor in weights.items()})
        self._bits, self._activations = scheme.weights, scheme.activations

    def logits(self, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
        """See `Subject.logits`."""
        ids = torch.tensor([[*prompt, *text[:-1]]])
        with torch.inference_mode():
            return self._model(ids, logits_to_keep=len(text), use_cache=False).logits[0, :, : self._vocab]

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        # Assigned, not copied: in 16 bits the model is then the source's own memory.
        self._model.load_state_dict(
            {name: tensor.float() for name, tensor in weights.items()}, strict=False, assign=True
        )
        if self._source.config.tie_word_embeddings:
            self._model.tie_weights()  # type: ignore[operator]

    def _rounded(self, name: str, tensor: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == FULL or tensor.dim() != 2:
            return tensor
        if "embed_tokens" in name or "lm_head" in name:
            return rounded(tensor, max(bits, HEAD_BITS), self._group, symmetric=True)
        return rounded(tensor, bits, self._group, symmetric=False)

    def _round_input(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._activations == FULL:
            return inputs
        bits = max(self._activations, HEAD_BITS) if module is self._head else self._activations
        return round_rows(inputs[0], bits, self._group), *inputs[1:]


def round_rows(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """x [..., k] to whole multiples of a step, that of each group of each row: its greatest magnitude over the top."""
    top = (1 << (bits - 1)) - 1
    padded = nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    step = (padded.abs().amax(-1, keepdim=True) / top).clamp(min=torch.finfo(x.dtype).tiny)
    return ((padded / step).round() * step).flatten(-2)[..., : x.shape[-1]]


class Exported:
    """An exported directory, through the class that a board would load: texts go through it as chains of a tree."""

    def __init__(self, drafter: CachedDrafter) -> None:
        self._drafter = drafter

    def logits(self, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
        """See `Subject.logits`. Raises as `Drafter.prefill`."""
        row: Any = self._drafter.prefill(prompt)
        found = np.empty((len(text), self._drafter.info.vocab_size), np.float32)
        found[0] = self._drafter.logits(row)
        for start in range(0, len(text) - 1, CHAIN):
            ids = text[start : min(start + CHAIN, len(text) - 1)]
            rows = self._drafter.extend([(ids[0], row), *((id, i) for i, id in enumerate(ids[1:]))])
            for i, made in enumerate(rows, start + 1):
                found[i] = self._drafter.logits(made)
            self._drafter.keep(rows)
            row = rows[-1]
        return torch.from_numpy(found)
