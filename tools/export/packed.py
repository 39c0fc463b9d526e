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
from tools.export.quantise import Blocks

PANEL = 16
NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}
ROWS = 4096  # of a matrix, unpacked at once


def matrix(name: str, blocks: Blocks, bias: torch.Tensor | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a product: packed, scales and zeros in panels, and the bias where there is one."""
    padded = -blocks.n % PANEL
    yield f"{name}.packed", np.concatenate(list(_panels(blocks)))
    yield f"{name}.scales", _by_panel(blocks.scales.astype(np.float16), padded)
    yield f"{name}.zeros", _by_panel(zeros(blocks), padded)
    if bias is not None:
        yield f"{name}.bias", np.pad(bias.float().numpy(), (0, padded))


def rows(name: str, blocks: Blocks) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a table that is read by rows."""
    yield f"{name}.packed", blocks.packed.reshape(blocks.n, -1)
    yield f"{name}.scales", blocks.scales.astype(np.float16)
    yield f"{name}.zeros", zeros(blocks)


def zeros(blocks: Blocks) -> np.ndarray:
    """Zero points, uint8 [n, groups]."""
    groups = blocks.scales.shape[1]
    if blocks.zero_points is None:
        return np.full((blocks.n, groups), 1 << (blocks.bits - 1), np.uint8)
    if blocks.bits == 8:
        return blocks.zero_points
    pairs = np.stack([blocks.zero_points & 15, blocks.zero_points >> 4], axis=-1)
    return pairs.reshape(blocks.n, -1)[:, :groups]


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


def decoder(
    config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], rope: tuple[np.ndarray, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a llama or qwen2 model. blocks: by the checkpoint's names, `embedding` and `head`."""

    def vector(name: str) -> np.ndarray:
        return weights[name].float().numpy()

    yield from zip(("cos", "sin"), rope, strict=True)
    yield "norm", vector("model.norm.weight")
    yield from rows("embedding", blocks["embedding"])
    yield from matrix("head", blocks["head"])
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield f"{layer}.attention_norm", vector(f"{prefix}input_layernorm.weight")
        yield f"{layer}.mlp_norm", vector(f"{prefix}post_attention_layernorm.weight")
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        biases = [weights[f"{name}.bias"] for name in qkv if f"{name}.bias" in weights]
        stacked = stack([blocks[f"{name}.weight"] for name in qkv])
        yield from matrix(f"{layer}.qkv", stacked, torch.cat(biases) if biases else None)
        out = f"{prefix}self_attn.o_proj"
        yield from matrix(f"{layer}.out", blocks[f"{out}.weight"], weights.get(f"{out}.bias"))
        for part in ("gate", "up", "down"):
            yield from matrix(f"{layer}.{part}", blocks[f"{prefix}mlp.{part}_proj.weight"])


def stack(parts: list[Blocks]) -> Blocks:
    """Matrices over the same inputs as one, row by row."""
    first = parts[0]
    points = [part.zero_points for part in parts if part.zero_points is not None]
    return Blocks(
        bits=first.bits,
        group=first.group,
        k=first.k,
        packed=np.concatenate([part.packed for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zero_points=np.concatenate(points) if points else None,
    )


def save(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
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
