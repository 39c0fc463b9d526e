"""The native drafter's file: the decoder's matrices in panels of 16 outputs, as `native/board/kernels.h` lays them out.

A safetensors file, every tensor at a multiple of 64 bytes so that it is used where it is mapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from edge.drafters.container import ALIGNMENT, TYPES
from edge.drafters.native import PANEL, ZERO_STEPS, Shape
from protocol.errors import ModelError
from tools.export.graph import head_dim
from tools.export.quantise import Blocks, concatenate, zeros
from tools.export.quantised import EMBEDDING, HEAD

Rope = tuple[np.ndarray, np.ndarray]  # each [context, head_dim / 2]
NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}
ROWS = 4096  # of a matrix, unpacked at once


def save(
    config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], path: Path, rope: Rope
) -> None:
    """Write the file of a llama or qwen2 model. blocks: as `quantised.quantise_model` gives them; rope: cos and sin.

    Raises ModelError for what the decoder cannot take.
    """
    shape = _shape(config, blocks)
    if problem := shape.problem():
        raise ModelError(
            f"the native decoder cannot take it: {problem}",
            where=f"{config.model_type} configuration",
            remedy="choose another --group, or --runtime onnx",
        )
    metadata = {name: str(getattr(shape, name)) for name in shape.__struct_fields__}
    _write(path, dict(_tensors(config, weights, blocks, rope)), metadata)


def _shape(config: Any, blocks: Mapping[str, Blocks]) -> Shape:
    layer, head, embedding = blocks["model.layers.0.self_attn.q_proj.weight"], blocks[HEAD], blocks[EMBEDDING]
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        inner=config.intermediate_size,
        vocab=embedding.n,
        head=head.n + -head.n % PANEL,
        bits=layer.bits,
        kv_bits=blocks["model.layers.0.self_attn.k_proj.weight"].bits,
        group=layer.group,
        head_bits=head.bits,
        head_group=head.group,
        embedding_bits=embedding.bits,
        embedding_group=embedding.group,
        zero_steps=ZERO_STEPS,
        epsilon=config.rms_norm_eps,
    )


def _tensors(
    config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], rope: Rope
) -> Iterator[tuple[str, np.ndarray]]:
    def vector(name: str) -> np.ndarray:
        return weights[name].float().numpy()

    yield from zip(("cos", "sin"), rope, strict=True)
    yield "norm", vector("model.norm.weight")
    yield from _rows("embedding", blocks[EMBEDDING])
    yield from matrix("head", blocks[HEAD])
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield f"{layer}.attention_norm", vector(f"{prefix}input_layernorm.weight")
        yield f"{layer}.mlp_norm", vector(f"{prefix}post_attention_layernorm.weight")
        for name, parts in (("queries", "q"), ("kv", "kv")):
            projections = [f"{prefix}self_attn.{part}_proj" for part in parts]
            biases = [weights[f"{part}.bias"] for part in projections if f"{part}.bias" in weights]
            stacked = concatenate([blocks[f"{part}.weight"] for part in projections])
            yield from matrix(f"{layer}.{name}", stacked, torch.cat(biases) if biases else None)
        out = f"{prefix}self_attn.o_proj"
        yield from matrix(f"{layer}.out", blocks[f"{out}.weight"], weights.get(f"{out}.bias"))
        for part in ("gate", "up", "down"):
            yield from matrix(f"{layer}.{part}", blocks[f"{prefix}mlp.{part}_proj.weight"])


def matrix(name: str, blocks: Blocks, bias: torch.Tensor | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a product: packed, scales and zeros in panels, and the bias where there is one."""
    padded = -blocks.n % PANEL
    yield f"{name}.packed", np.concatenate(list(_panels(blocks)))
    yield f"{name}.scales", _by_panel(blocks.scales.astype(np.float16), padded)
    yield f"{name}.zeros", _by_panel(_points(blocks), padded)
    if bias is not None:
        yield f"{name}.bias", np.pad(bias.float().numpy(), (0, padded))


def _rows(name: str, blocks: Blocks) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a table that is read by rows."""
    yield f"{name}.packed", blocks.packed.reshape(blocks.n, -1)
    yield f"{name}.scales", blocks.scales.astype(np.float16)
    yield f"{name}.zeros", _points(blocks)


def _points(blocks: Blocks) -> np.ndarray:
    """Zero points as the decoder takes them, uint8 [n, groups]: of four bits in sixteenths of a level."""
    return (zeros(blocks) * (ZERO_STEPS if blocks.bits == 4 else 1)).astype(np.uint8)


def _panels(blocks: Blocks) -> Iterator[np.ndarray]:
    """uint8 [panels, steps, 16 outputs, 4] of ROWS rows at a time."""
    for start in range(0, blocks.n, ROWS):
        part = blocks.packed[start : start + ROWS].reshape(min(ROWS, blocks.n - start), -1)
        part = np.pad(part, ((0, -len(part) % PANEL), (0, 0)))
        if blocks.bits == 8:
            steps = part.reshape(-1, PANEL, part.shape[1] // 4, 4)
        else:
            pairs = np.stack([part & 15, part >> 4], axis=-1).reshape(len(part), -1, 2, 4)
            steps = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, PANEL, pairs.shape[1], 4)
        yield np.ascontiguousarray(steps.transpose(0, 2, 1, 3))


def _by_panel(values: np.ndarray, padded: int) -> np.ndarray:
    """[n, groups] -> [panels, groups, 16]."""
    values = np.pad(values, ((0, padded), (0, 0)))
    return np.ascontiguousarray(values.reshape(-1, PANEL, values.shape[1]).transpose(0, 2, 1))


def _write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size + -size % ALIGNMENT
    header = msgspec.json.encode(entries)
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
            file.write(bytes(-tensor.nbytes % ALIGNMENT))
