"""Quantisation calibrated on text: each layer is rounded for the inputs that it gets from the rounded layers before it.

Two streams run through the model, one through the matrices as they are and one through those already rounded. Before a
matrix is rounded it is moved, by least squares, to where its products with the second stream's inputs give what the
first stream has; so a layer also mends what the layers before it have broken. Then it is rounded with compensation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.export import gptq, store
from tools.export.forward import Decoder, plain
from tools.export.quantise import Blocks, dequantise
from tools.export.quantised import EMBEDDING, HEAD, WEIGHT_BITS, Options, Progress, head, round_embedding

CHUNK = 2048  # tokens at a time
CORRECTION = 1.0  # how much of the way to the least squares solution a matrix is moved
RIDGE = 0.05


class Moments:
    """Second moments of a product's inputs x [tokens, k], and with what y [tokens, m] they are to give."""

    def __init__(self) -> None:
        self.inputs: Any = 0  # [k, k]
        self.crossed: Any = 0  # [m, k]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.inputs = self.inputs + x.T @ x
        self.crossed = self.crossed + y.T @ x


def corrected(weight: torch.Tensor, moments: torch.Tensor, crossed: torch.Tensor) -> torch.Tensor:
    """The matrix [n, k] of least squares for outputs crossed with inputs [n, k], held near `weight` by a ridge."""
    if not CORRECTION:
        return weight
    factor = torch.linalg.cholesky(gptq.damped(moments, RIDGE))
    change = torch.cholesky_solve((crossed - weight @ moments).T, factor).T
    return weight + CORRECTION * change


class Streams:
    """x, y: the residual streams [tokens, hidden] of the rounded and of the given model, at the layer that is next."""

    def __init__(
        self, config: Any, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor, texts: Sequence[torch.Tensor]
    ) -> None:
        self.decoder, self.weights = Decoder(config, weights), weights
        ids = torch.cat(list(texts))
        self.x, self.y = embedding[ids], weights[EMBEDDING][ids].float()
        self.chunks = _chunks([len(text) for text in texts], self.decoder)

    def skip(self, layer: int, blocks: Mapping[str, Blocks]) -> None:
        """Run a layer that is rounded already."""
        rounded = {name: dequantise(part) for name, part in blocks.items()}
        for chunk, lengths, rope in self.chunks:
            self.x[chunk] = self.decoder.layer(layer, self.x[chunk], lengths, rope, plain(rounded))
            self.y[chunk] = self.decoder.layer(layer, self.y[chunk], lengths, rope, plain(self.weights))

    def round_layer(self, layer: int, options: Options) -> dict[str, Blocks]:
        """Round a layer's matrices, stage by stage, and run it."""
        decoder, x, y, name = self.decoder, self.x, self.y, f"model.layers.{layer}"
        blocks: dict[str, Blocks] = {}
        rounded: dict[str, torch.Tensor] = {}

        def settle(parts: Sequence[str], moments: Moments, wanted: bool = False) -> None:
            """Round matrices of the same inputs. wanted: the moments were crossed with outputs, not with inputs."""
            names = [f"{name}.{part}_proj.weight" for part in parts]
            weight = torch.cat([self.weights[name].float() for name in names])
            crossed = moments.crossed if wanted else weight @ moments.crossed
            weight = corrected(weight, moments.inputs, crossed)
            for name_, part in zip(names, weight.split([len(self.weights[name]) for name in names]), strict=True):
                with ieee():
                    blocks[name_] = gptq.round_matrix(part, moments.inputs, WEIGHT_BITS, options.group, options.symmetric)
                rounded[name_] = dequantise(blocks[name_])

        moments = Moments()
        norm = f"{name}.input_layernorm"
        for chunk, _, _ in self.chunks:
            moments.add(decoder.norm(norm, x[chunk]), decoder.norm(norm, y[chunk]))
        settle(("self_attn.q", "self_attn.k", "self_attn.v"), moments)

        moments, inputs, out = Moments(), [], f"{name}.self_attn.o_proj"
        for chunk, lengths, rope in self.chunks:
            attended = decoder.attend(layer, decoder.norm(norm, y[chunk]), lengths, rope, plain(self.weights))
            y[chunk] += decoder.product(out, attended, plain(self.weights))
            inputs.append(decoder.attend(layer, decoder.norm(norm, x[chunk]), lengths, rope, plain(rounded)))
            moments.add(inputs[-1], y[chunk] - x[chunk] - decoder.vectors.get(f"{out}.bias", 0))
        settle(("self_attn.o",), moments, wanted=True)
        for (chunk, _, _), attended in zip(self.chunks, inputs, strict=True):
            x[chunk] += decoder.product(out, attended, plain(rounded))

        moments = Moments()
        norm = f"{name}.post_attention_layernorm"
        for chunk, _, _ in self.chunks:
            moments.add(decoder.norm(norm, x[chunk]), decoder.norm(norm, y[chunk]))
        settle(("mlp.gate", "mlp.up"), moments)

        moments, inputs, out = Moments(), [], f"{name}.mlp.down_proj"
        for chunk, _, _ in self.chunks:
            gated = decoder.gate(layer, decoder.norm(norm, y[chunk]), plain(self.weights))
            y[chunk] += decoder.product(out, gated, plain(self.weights))
            inputs.append(decoder.gate(layer, decoder.norm(norm, x[chunk]), plain(rounded)))
            moments.add(inputs[-1], y[chunk] - x[chunk] - decoder.vectors.get(f"{out}.bias", 0))
        settle(("mlp.down",), moments, wanted=True)
        for (chunk, _, _), gated in zip(self.chunks, inputs, strict=True):
            x[chunk] += decoder.product(out, gated, plain(rounded))
        return blocks

    def round_head(self, options: Options) -> Blocks:
        moments = Moments()
        for chunk, _, _ in self.chunks:
            moments.add(*(self.decoder.norm("model.norm", stream[chunk]) for stream in (self.x, self.y)))
        matrix = head(self.weights).float()
        matrix = corrected(matrix, moments.inputs, matrix @ moments.crossed)
        with ieee():
            symmetric = options.symmetric or options.head_bits == 8
            return gptq.round_matrix(matrix, moments.inputs, options.head_bits, options.group, symmetric)


@contextmanager
def ieee():
    """Products in full float32, where processors that have bfloat16 are else let use it for their factors."""
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def _chunks(lengths: Sequence[int], decoder: Decoder) -> list[tuple[slice, list[int], tuple[torch.Tensor, torch.Tensor]]]:
    """Whole texts in parts of about CHUNK tokens: where they lie, their lengths, and their rotary embedding."""
    chunks, start, part = [], 0, []
    for index, length in enumerate(lengths):
        part.append(length)
        if sum(part) >= CHUNK or index == len(lengths) - 1:
            chunks.append((slice(start, start + sum(part)), part, decoder.rope(part)))
            start, part = start + sum(part), []
    return chunks


@torch.no_grad()
def calibrate(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    options: Options,
    texts: Sequence[torch.Tensor],
    workdir: Path,
    progress: Progress | None = None,
) -> dict[str, Blocks]:
    """Every matrix of a checkpoint by its own name.

    workdir: where each layer's result is kept: a later call with the same arguments goes on from there.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    embedding = round_embedding(weights, options)
    layers = config.num_hidden_layers
    streams = Streams(config, weights, dequantise(embedding), texts)
    blocks = {}
    for layer in range(layers):
        path = workdir / f"layer-{layer:02}.safetensors"
        if path.exists():
            part = store.load(path)
            streams.skip(layer, part)
        else:
            part = streams.round_layer(layer, options)
            store.save(path, part)
        blocks |= part
        if progress:
            progress(layer + 1, layers + 1)
    blocks[HEAD] = streams.round_head(options)
    blocks[EMBEDDING] = embedding
    return blocks
