"""Quantisation calibrated on text: each layer is rounded for the inputs that it gets from the rounded layers before it.

Two streams run through the model, one through the matrices as they are and one through those already rounded. Before a
matrix is rounded it is moved, by least squares, to where its products with the second stream's inputs give what the
first stream has; so a layer also mends what the layers before it have broken. Then it is rounded with compensation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.export import gptq, store
from tools.export.calibration_text import Corpus
from tools.export.forward import Decoder, Linear, Rope, plain
from tools.export.quantise import Blocks, dequantise
from tools.export.quantised import (
    EMBEDDING,
    HEAD,
    Options,
    Progress,
    embedded,
    head,
    round_embedding,
    round_plainly,
    shares_head,
)

METHOD = 1  # counts changes of what is computed here, which earlier results are not to be mixed with
CHUNK = 2048  # tokens at a time
RIDGE = 0.2  # of the mean second moment of a matrix's inputs, which holds the correction back


class Moments:
    """Of a product's inputs x [tokens, k], and of what it falls short by, y [tokens, m], with them."""

    def __init__(self) -> None:
        self.inputs: Any = 0  # [k, k]
        self.missing: Any = 0  # [m, k]

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.inputs = self.inputs + x.T @ x
        self.missing = self.missing + y.T @ x


def corrected(weight: torch.Tensor, inputs: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """weight [n, k] moved by least squares to where its outputs fall short no more, a ridge holding it near.

    inputs: second moments [k, k]; missing: what the outputs fall short by, with the inputs, [n, k].
    """
    factor = torch.linalg.cholesky(gptq.damped(inputs, RIDGE))
    return weight + torch.cholesky_solve(missing.T, factor).T


class Streams:
    """The residual streams of the rounded model and of the given one, as far as they were needed.

    x, y: [tokens, hidden] of the two, before layer `reached`.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, torch.Tensor],
        embedding: Mapping[str, Blocks],
        texts: Sequence[torch.Tensor],
    ) -> None:
        self.decoder, self.weights, self.reached = Decoder(config, weights), weights, 0
        ids = torch.cat(list(texts))
        self.x, self.y = embedded(weights, embedding, ids), weights[EMBEDDING][ids].float()
        self.chunks = _chunks([len(text) for text in texts], self.decoder)

    def run_to(self, layer: int, blocks: Mapping[str, Blocks]) -> None:
        """Run the layers before `layer`, which are rounded already."""
        for done in range(self.reached, layer):
            prefix = f"model.layers.{done}."
            rounded = {name: dequantise(part) for name, part in blocks.items() if name.startswith(prefix)}
            for chunk, lengths, rope in self.chunks:
                self.x[chunk] = self.decoder.layer(done, self.x[chunk], lengths, rope, plain(rounded))
                self.y[chunk] = self.decoder.layer(done, self.y[chunk], lengths, rope, plain(self.weights))
        self.reached = layer

    def round_layer(self, layer: int, options: Options, blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        """Round a layer's matrices, those before it being `blocks`, and run it."""
        self.run_to(layer, blocks)
        rounder, name = Rounder(self.weights, options), f"model.layers.{layer}"

        def attend(x: torch.Tensor, lengths: Sequence[int], rope: Rope, linear: Linear) -> torch.Tensor:
            return self.decoder.attend(layer, x, lengths, rope, linear)

        def gate(x: torch.Tensor, lengths: Sequence[int], rope: Rope, linear: Linear) -> torch.Tensor:
            return self.decoder.gate(layer, x, linear)

        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        self._round_branch(rounder, f"{name}.input_layernorm", parts, attend, f"{attention}.o_proj")
        parts = [f"{mlp}.{part}_proj" for part in ("gate", "up")]
        self._round_branch(rounder, f"{name}.post_attention_layernorm", parts, gate, f"{mlp}.down_proj")
        self.reached = layer + 1
        return rounder.blocks

    def _round_branch(
        self, rounder: Rounder, norm: str, parts: Sequence[str], inner: Callable[..., torch.Tensor], out: str
    ) -> None:
        """x + out(inner(norm(x))), where `inner` multiplies by `parts`: round these, then `out` behind them."""
        decoder, x, y, exact = self.decoder, self.x, self.y, plain(self.weights)
        moments = Moments()
        for chunk, _, _ in self.chunks:
            normed = decoder.norm(norm, x[chunk])
            moments.add(normed, decoder.norm(norm, y[chunk]) - normed)
        rounder.round(parts, moments.inputs, rounder.stack(parts) @ moments.missing)

        moments, inputs = Moments(), []
        for chunk, lengths, rope in self.chunks:
            y[chunk] += decoder.product(out, inner(decoder.norm(norm, y[chunk]), lengths, rope, exact), exact)
            inputs.append(inner(decoder.norm(norm, x[chunk]), lengths, rope, rounder.linear))
            moments.add(inputs[-1], y[chunk] - x[chunk] - decoder.product(out, inputs[-1], exact))
        rounder.round([out], moments.inputs, moments.missing)
        for (chunk, _, _), part in zip(self.chunks, inputs, strict=True):
            x[chunk] += decoder.product(out, part, rounder.linear)

    def round_head(self, options: Options, blocks: Mapping[str, Blocks]) -> dict[str, Blocks]:
        self.run_to(self.decoder.config.num_hidden_layers, blocks)
        moments = Moments()
        for chunk, _, _ in self.chunks:
            normed = self.decoder.norm("model.norm", self.x[chunk])
            moments.add(normed, self.decoder.norm("model.norm", self.y[chunk]) - normed)
        matrix = head(self.weights).float()
        matrix = corrected(matrix, moments.inputs, matrix @ moments.missing)
        return {HEAD: _round(matrix, moments.inputs, options.head_bits, options)}


class Rounder:
    """A layer's matrices as they are rounded, one after the other."""

    def __init__(self, weights: Mapping[str, torch.Tensor], options: Options) -> None:
        self.weights, self.options = weights, options
        self.blocks: dict[str, Blocks] = {}
        self._rounded: dict[str, torch.Tensor] = {}
        self.linear = plain(self._rounded)

    def stack(self, parts: Sequence[str]) -> torch.Tensor:
        """Matrices of the same inputs, one below the other."""
        return torch.cat([self.weights[f"{part}.weight"].float() for part in parts])

    def round(self, parts: Sequence[str], inputs: torch.Tensor, missing: torch.Tensor) -> None:
        """Round matrices of the same inputs. missing: what their outputs fall short by, [rows of all parts, k]."""
        names = [f"{part}.weight" for part in parts]
        weights = corrected(self.stack(parts), inputs, missing).split([len(self.weights[name]) for name in names])
        for name, weight in zip(names, weights, strict=True):
            self.blocks[name] = _round(weight, inputs, self.options.bits_of(name), self.options)
            self._rounded[name] = dequantise(self.blocks[name])


def _round(weight: torch.Tensor, inputs: torch.Tensor, bits: int, options: Options) -> Blocks:
    symmetric, steps = options.symmetric_in(bits), options.zero_steps
    return gptq.round_matrix(weight, inputs, bits, options.group, symmetric, steps, positive=options.positive)


@contextmanager
def fast_products() -> Iterator[None]:
    """Float32 products with bfloat16 factors and float32 sums, on processors that have them."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _chunks(lengths: Sequence[int], decoder: Decoder) -> list[tuple[slice, list[int], Rope]]:
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
    corpus: Corpus,
    workdir: Path,
    progress: Progress | None = None,
) -> dict[str, Blocks]:
    """Every matrix of a checkpoint by its own name, as `quantised.quantise_model` gives them.

    A head of 8 bits that is the embedding too is rounded plainly: it loses nothing.
    workdir: where results are kept, by layer: a later call for the same model, options and corpus goes on from there.
    progress: called with (layers done, layers in all), the head counting as one.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    layers = config.num_hidden_layers
    shared = shares_head(weights, options) and options.head_bits == 8

    def kept(name: str, make: Callable[[], dict[str, Blocks]]) -> dict[str, Blocks]:
        path = workdir / f"{name}.safetensors"
        if not path.exists():
            store.save(path, make())
        return store.load(path)

    def embedding() -> dict[str, Blocks]:
        with gptq.one_thread():
            if shared:
                return {EMBEDDING: round_plainly(head(weights), options.head_bits, options)}
            return {EMBEDDING: round_embedding(weights, options)}

    with fast_products():
        blocks = kept("embedding", embedding) if options.rounds_embedding else {}
        streams = Streams(config, weights, blocks, corpus.texts)
        for layer in range(layers):
            blocks |= kept(f"layer-{layer:03}", partial(streams.round_layer, layer, options, blocks))
            if progress:
                progress(layer + 1, layers + 1)
        blocks |= {HEAD: blocks[EMBEDDING]} if shared else kept("head", partial(streams.round_head, options, blocks))
        if progress:
            progress(layers + 1, layers + 1)
    return blocks


def key(source: str, options: Options, corpus: Corpus) -> str:
    """Names what a calibration depends on: the source's digest, the options that shape matrices, and the corpus."""
    # Where the head may be the embedding's matrix, what is rounded is not what it is elsewhere.
    shared = options.runtime == "onnx" and options.head_bits == 8 and options.embedding_bits is None
    vocabulary = (options.head_bits, options.embedding_bits or options.head_bits)
    layout = (options.symmetric, options.positive, options.zero_steps, options.rounds_embedding)
    shapes = (options.bits, options.kv_bits, options.group, *layout, *vocabulary)
    return hashlib.sha256(repr((METHOD, source, shapes, shared, corpus.digest)).encode()).hexdigest()[:16]
