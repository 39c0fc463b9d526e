"""A model's matrices, quantised: what every exporter writes, in whatever layout its runtime reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edge.drafters.native import ZERO_STEPS
from tools.export.quantise import Blocks, dequantise, quantise, take

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
KV = ("k_proj.weight", "v_proj.weight")

# Two quantisations of one matrix differ by less than this of its norm; other matrices by about 1.4.
SAME_MATRIX = 0.15

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How a drafter is quantised, and for which runtime it is written: a key of `DRAFTER_WEIGHTS`.

    bits: of the layers' matrices. group: weights that share a scale. embedding_bits: None where the embedding is to be
    the head's matrix, if the model ties the two and the runtime is `onnx`; others lay the two out in other ways.
    symmetric: no zero points in matrices of 4 bits.
    accuracy_level: of MatMulNBits, 4 computes with int8 activations, 1 with float32. context: tokens.
    """

    runtime: str = "onnx"
    bits: int = 4
    group: int = 32
    head_bits: int = 8
    embedding_bits: int | None = None
    symmetric: bool = False
    accuracy_level: int = 4
    context: int | None = None

    @property
    def zero_steps(self) -> int:
        """Into how many steps a zero point may divide a level: what the runtime can compute with."""
        return ZERO_STEPS if self.runtime == "native" else 1

    @property
    def positive(self) -> bool:
        """Whether scales must be: TensorRT takes no other."""
        return self.runtime == "tensorrt"

    @property
    def rounds_embedding(self) -> bool:
        """TensorRT has no operator that takes rows of four or eight bits."""
        return self.runtime != "tensorrt"

    @property
    def kv_bits(self) -> int:
        """Of the matrices that make keys and values. They are small, and an error of theirs is in all that is attended
        to later: of Qwen2.5-Coder 0.5B they are 1.5 % of the layers' weights and 28 % of what 4 bits cost it.
        """
        return 8 if self.runtime == "native" else self.bits

    def bits_of(self, name: str) -> int:
        """Of a layer's matrix."""
        return self.kv_bits if name.endswith(KV) else self.bits

    def symmetric_in(self, bits: int) -> bool:
        """Whether a matrix of so many bits has no zero points: 8 bits have levels enough to do without."""
        return self.symmetric or bits == 8


def quantise_model(
    config: Any, weights: Mapping[str, torch.Tensor], options: Options, progress: Progress | None = None
) -> dict[str, Blocks]:
    """Every matrix of a checkpoint by its own name, each rounded by itself.

    The head is there under its name for tied models too; embedding and head are one object where they share a matrix.
    The embedding is not there where the runtime holds it in float16.
    progress: called with (layers done, layers in all).
    """
    blocks = {HEAD: round_plainly(head(weights), options.head_bits, options)}
    if options.rounds_embedding:
        blocks[EMBEDDING] = blocks[HEAD] if shares_head(weights, options) else round_embedding(weights, options)
    for layer in range(config.num_hidden_layers):
        for name in layer_matrices(weights, layer):
            blocks[name] = round_plainly(weights[name], options.bits_of(name), options)
        if progress:
            progress(layer + 1, config.num_hidden_layers)
    return blocks


def layer_matrices(weights: Iterable[str], layer: int) -> list[str]:
    """Names of a layer's matrices, in the checkpoint's order."""
    return [name for name in weights if re.fullmatch(rf"model\.layers\.{layer}\..*_proj\.weight", name)]


def head(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The matrix [vocab, hidden] that makes logits of hidden states."""
    return weights.get(HEAD, weights[EMBEDDING])


def shares_head(weights: Mapping[str, torch.Tensor], options: Options) -> bool:
    """Whether the head's blocks are the embedding's too: the two are one matrix, and nothing else is asked for."""
    tied = HEAD not in weights or _same_matrix(weights[EMBEDDING], weights[HEAD])
    return tied and options.embedding_bits is None and options.runtime == "onnx"


def round_embedding(weights: Mapping[str, torch.Tensor], options: Options) -> Blocks:
    return round_plainly(weights[EMBEDDING], options.embedding_bits or options.head_bits, options)


def embedded(weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], ids: torch.Tensor) -> torch.Tensor:
    """What the exported model has for tokens: float32 [tokens, hidden]."""
    if EMBEDDING in blocks:
        return dequantise(take(blocks[EMBEDDING], ids.numpy()))
    return weights[EMBEDDING][ids].half().float()


def round_plainly(matrix: torch.Tensor, bits: int, options: Options) -> Blocks:
    """A matrix [n, k], rounded by itself."""
    symmetric = options.symmetric_in(bits)
    return quantise(matrix, bits, options.group, symmetric, options.zero_steps, positive=options.positive)


def _same_matrix(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices are one, quantised twice, as in GGUF files of models with tied embeddings."""
    if a.shape != b.shape:
        return False
    sample = slice(0, None, max(1, a.shape[0] // 4096))
    x, y = a[sample].float(), b[sample].float()
    return float((x - y).norm()) < SAME_MATRIX * float(y.norm())
