"""The forward pass of decoders like llama's in fewer and larger operations than transformers takes.

On a CPU a step of few rows spends as long on small operations and on what Python does between them as on products. A
query, key and value are one product here, gate and up another; rows are [rows, width] throughout, without a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from cloud.engines.elementwise import Native, Torch
from cloud.engines.ragged import Layout, attend

FAMILIES = ("llama", "qwen2")
"""Model types whose layers are known to be these; that a model is one is tested at its start all the same."""


class Layer(nn.Module):
    """One transformer block, made of transformers' own."""

    def __init__(self, block: Any, index: int, by: Torch | Native) -> None:
        super().__init__()
        attention, mlp = block.self_attn, block.mlp
        self.by = by
        self.layer_idx, self.head_dim = index, int(attention.head_dim)
        self.key_heads = attention.k_proj.out_features // self.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.scaling: float = attention.scaling
        self.eps: float = block.input_layernorm.variance_epsilon
        self.attention_norm = block.input_layernorm.weight  # [width]
        self.mlp_norm = block.post_attention_layernorm.weight  # [width]
        self.query_key_value = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = attention.o_proj
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj])
        self.act = mlp.act_fn
        self.down = mlp.down_proj

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
    """A whole model, made of transformers' own, with whose weights it goes on. by: what runs between products."""

    def __init__(self, model: PreTrainedModel, by: Torch | Native) -> None:
        super().__init__()
        self.by = by
        body: Any = model.model
        self.embedding = body.embed_tokens.weight  # [vocab, width]
        self.rotary = body.rotary_emb
        self.layers = nn.ModuleList(Layer(block, i, by) for i, block in enumerate(body.layers))
        self.norm, self.eps = body.norm.weight, body.norm.variance_epsilon
        self.head = model.lm_head

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, layout: Layout) -> torch.Tensor:
        """ids, positions: [rows]; kept: [n] rows. Returns their logits [n, vocab]."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.rotary(x, positions[None])  # [1, rows, head_dim]
        first, second = sin[0].chunk(2, -1)
        cos, sin = cos[0, :, None], torch.cat((-first, second), -1)[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, layout)
        return self.head(self.by.norm(x[kept], self.norm, self.eps))


def joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the outputs of all parts, side by side."""
    first = parts[0]
    bias: list[torch.Tensor] = [part.bias.detach() for part in parts if part.bias is not None]
    with torch.device("meta"):
        whole = nn.Linear(first.in_features, sum(part.out_features for part in parts), bias=bool(bias))
    whole.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
    if bias:
        whole.bias = nn.Parameter(torch.cat(bias), requires_grad=False)
    return whole
