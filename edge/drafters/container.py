"""A safetensors file, mapped into memory: tensors are read where they lie, and only pages that are used are held."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from protocol.errors import ModelError

TYPES = {"U8": np.uint8, "I32": np.int32, "F16": np.float16, "F32": np.float32}
LONGEST_HEADER = 1 << 24
ALIGNMENT = 64


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Container:
    """tensors: by name, read-only views of the mapping; metadata: what its writer noted."""

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def read(path: Path) -> Container:
    """Map a file. Raises ModelError for one that cannot be read or is not what its header says."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), remedy="export the model again") from error
    try:
        size = int.from_bytes(mapped[:8], "little")
        if not 2 <= size <= min(LONGEST_HEADER, len(mapped) - 8):
            raise ValueError(f"a header of {size} bytes in a file of {len(mapped)}")
        entries = msgspec.json.decode(mapped[8 : 8 + size], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        found = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
        tensors = {name: _view(mapped, 8 + size, name, tensor) for name, tensor in found.items()}
    except (ValueError, msgspec.DecodeError) as error:
        problem = f"not a safetensors file: {error}"
        raise ModelError(problem, where=str(path), remedy="export the model again") from error
    return Container(tensors, metadata)


def _view(mapped: mmap.mmap, start: int, name: str, tensor: _Tensor) -> np.ndarray:
    first, end = tensor.data_offsets
    dtype = TYPES.get(tensor.dtype)
    if dtype is None or min(tensor.shape, default=0) < 0:
        raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not known")
    count = prod(tensor.shape)
    if not 0 <= first <= end <= len(mapped) - start or end - first != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{name}: bytes {first} to {end} are not {tensor.dtype} {list(tensor.shape)}")
    if (start + first) % np.dtype(dtype).itemsize:
        raise ValueError(f"{name}: {tensor.dtype} at byte {start + first}, which is not a multiple of its size")
    return np.frombuffer(mapped, dtype, count, start + first).reshape(tensor.shape)
