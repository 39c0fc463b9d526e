"""The forward pass of llama and qwen2 models in float32, over texts laid end to end, with matrices of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

# Of a matrix by its name and inputs [tokens, k]: the product [tokens, n], without bias.
Linear = Callable[[str, torch.Tensor], torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [tokens, head_dim]


class Decoder:
    """Everything of a model but its matrices: norms, biases, rotary embedding and attention."""

    def __init__(self, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """weights: of which norms and biases are used."""
        self.config = config
        self.vectors = {name: value.float() for name, value in weights.items() if value.dim() == 1}
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def hidden(self, embedded: torch.Tensor, lengths: Sequence[int], linear: Linear) -> torch.Tensor:
        """Embedded tokens [tokens, hidden] of texts of `lengths` -> what the head multiplies, [tokens, hidden]."""
        rope = self.rope(lengths)
        for layer in range(self.config.num_hidden_layers):
            embedded = self.layer(layer, embedded, lengths, rope, linear)
        return self.norm("model.norm", embedded)

    def layer(self, layer: int, x: torch.Tensor, lengths: Sequence[int], rope: Rope, linear: Linear) -> torch.Tensor:
        """x [tokens, hidden] before and after a layer."""
        name = f"model.layers.{layer}"
        attended = self.attend(layer, self.norm(f"{name}.input_layernorm", x), lengths, rope, linear)
        x = x + self.product(f"{name}.self_attn.o_proj", attended, linear)
        gated = self.gate(layer, self.norm(f"{name}.post_attention_layernorm", x), linear)
        return x + self.product(f"{name}.mlp.down_proj", gated, linear)

    def product(self, name: str, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x [tokens, k] times the matrix, plus its bias where it has one."""
        out, bias = linear(f"{name}.weight", x), self.vectors.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.vectors[f"{name}.weight"], self.config.rms_norm_eps)

    def gate(self, layer: int, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """x [tokens, hidden] -> what `down_proj` multiplies, [tokens, intermediate]."""
        gate, up = (self.product(f"model.layers.{layer}.mlp.{part}_proj", x, linear) for part in ("gate", "up"))
        return functional.silu(gate) * up

    def attend(self, layer: int, x: torch.Tensor, lengths: Sequence[int], rope: Rope, linear: Linear) -> torch.Tensor:
        """x [tokens, hidden] -> what `o_proj` multiplies, [tokens, heads * head_dim]. Texts do not see each other."""
        q, k, v = (
            self.product(f"model.layers.{layer}.self_attn.{part}_proj", x, linear).unflatten(1, (-1, self.head_dim))
            for part in "qkv"
        )  # [tokens, heads, head_dim]
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        texts = zip(*(part.transpose(0, 1).split(list(lengths), dim=1) for part in (q, k, v)), strict=True)
        attended = [
            functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            for queries, keys, values in texts
        ]
        return torch.cat([text.transpose(0, 1).flatten(1) for text in attended])

    def rope(self, lengths: Sequence[int]) -> Rope:
        """cos and sin [tokens, head_dim], as transformers computes them for this configuration."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        positions = torch.cat([torch.arange(length) for length in lengths])
        cos, sin = LlamaRotaryEmbedding(self.config)(torch.zeros(1), positions[None])
        return cos[0], sin[0]


def plain(weights: Mapping[str, torch.Tensor]) -> Linear:
    """Products with the matrices of a checkpoint."""
    return lambda name, x: functional.linear(x, weights[name])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], rotated in pairs of its halves."""
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]
