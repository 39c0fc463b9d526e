"""Decoders like llama's, from their files to logits, in fewer and larger operations than transformers takes.

On a CPU a step of few rows spends as long on small operations and on what Python does between them as on products. A
query, key and value are one product here, gate and up another; rows are [rows, width] throughout, without a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from cloud.engines.decoder_config import DecoderConfig
from cloud.engines.elementwise import Native, Torch
from cloud.engines.ragged import Layout, attend

Weights = dict[str, torch.Tensor]


class Layer(nn.Module):
    """One transformer block. Takes its weights out of `weights`."""

    def __init__(self, config: DecoderConfig, weights: Weights, index: int, by: Torch | Native) -> None:
        super().__init__()
        self.by = by
        self.layer_idx, self.head_dim = index, config.head_width
        self.heads, self.key_heads = config.num_attention_heads, config.key_heads
        self.scaling, self.eps = config.head_width**-0.5, config.rms_norm_eps
        own = f"model.layers.{index}"
        self.attention_norm = vector(weights, f"{own}.input_layernorm.weight")
        self.mlp_norm = vector(weights, f"{own}.post_attention_layernorm.weight")
        self.query_key_value = linear(weights, *(f"{own}.self_attn.{name}_proj" for name in "qkv"))
        self.out = linear(weights, f"{own}.self_attn.o_proj")
        self.gate_up = linear(weights, f"{own}.mlp.gate_proj", f"{own}.mlp.up_proj")
        self.act = nn.SiLU()
        self.down = linear(weights, f"{own}.mlp.down_proj")

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> torch.Tensor:
        """x: [rows, width]; cos, sin: [rows, 1, head_dim], the first half of sin negated."""
        rows = self.query_key_value(self.by.norm(x, self.attention_norm, self.eps))
        rows = rows.view(len(x), -1, self.head_dim)  # [rows, heads + 2 * key heads, head_dim]
        turned = self.by.rotate(rows, self.heads + self.key_heads, cos, sin)
        query, key = turned[:, : self.heads], turned[:, self.heads :]
        value = rows[:, self.heads + self.key_heads :]
        if layout.few is not None and not layout.tiles:
            mixed = layout.few.attend(self.layer_idx, query, key, value, self.scaling)  # [rows, heads, head_dim]
        else:
            query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
            mixed, _ = attend(self, query, key, value, None, self.scaling, layout=layout)
        x = self.out(mixed.reshape(len(x), -1)).add_(x)
        gate, up = self.gate_up(self.by.norm(x, self.mlp_norm, self.eps)).chunk(2, -1)
        return self.down(self.act(gate).mul_(up)).add_(x)


class Decoder(nn.Module):
    """A whole model. by: what runs between products.

    Takes its weights out of `weights`, by their names in transformers. Raises KeyError for one that is not there.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, by: Torch | Native) -> None:
        super().__init__()
        self.by = by
        self.embedding = vector(weights, "model.embed_tokens.weight")  # [vocab, width]
        self.frequencies = config.rope_parameters.frequencies(config.head_width)
        self.layers = nn.ModuleList(Layer(config, weights, i, by) for i in range(config.num_hidden_layers))
        self.norm, self.eps = vector(weights, "model.norm.weight"), config.rms_norm_eps
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = self.embedding.detach()
        self.head = linear(weights, "lm_head")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, layout: Layout) -> torch.Tensor:
        """ids, positions: [rows]; kept: [n] rows. Returns their logits [n, vocab]."""
        x = F.embedding(ids, self.embedding)
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)  # [rows, head_dim]
        first, second = angles.sin().to(x.dtype).chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype)[:, None], torch.cat((-first, second), -1)[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, layout)
        return self.head(self.by.norm(x[kept], self.norm, self.eps))


def load_decoder(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, by: Torch | Native
) -> tuple[Decoder, Sequence[str]]:
    """The model of `directory`, and the names of weights that it has no use for.

    Raises KeyError for a weight that is not there, and what safetensors raises for a file that cannot be read.
    """
    weights: Weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= {name: weight.to(dtype) for name, weight in load_file(path).items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return Decoder(config, weights, by).eval(), list(weights)


def vector(weights: Weights, name: str) -> nn.Parameter:
    return nn.Parameter(weights.pop(name), requires_grad=False)


def linear(weights: Weights, *names: str) -> nn.Linear:
    """One layer that gives the outputs of all the named ones, side by side."""
    parts = [weights.pop(f"{name}.weight") for name in names]
    bias = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    if bias and len(bias) < len(parts):
        raise KeyError(f"{names} have biases in part")
    weight = torch.cat(parts) if len(parts) > 1 else parts[0]
    with torch.device("meta"):
        whole = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias))
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        whole.bias = nn.Parameter(torch.cat(bias) if len(bias) > 1 else bias[0], requires_grad=False)
    return whole
