"""A safetensors file, mapped into memory: tensors are read where they lie, and only pages that are used are held.

What every pass reads from end to end may be copied into huge pages instead: with small ones a processor spends a tenth
to a fifth of such a pass on finding out where the pages are.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from protocol.errors import ModelError

TYPES = {"U8": np.uint8, "I32": np.int32, "F16": np.float16, "F32": np.float32}
LONGEST_HEADER = 1 << 24
ALIGNMENT = 64
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Container:
    """tensors: by name, read-only, of the mapping or of huge pages; metadata: what its writer noted."""

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def read(path: Path, *, huge: Callable[[str], bool] = lambda name: False) -> Container:
    """Map a file. huge: which tensors, by name, are copied into huge pages, where the kernel has such.

    Raises ModelError for a file that cannot be read or is not what its header says.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            size = int.from_bytes(mapped[:8], "little")
            if not 2 <= size <= min(LONGEST_HEADER, len(mapped) - 8):
                raise ValueError(f"a header of {size} bytes in a file of {len(mapped)}")
            entries = msgspec.json.decode(mapped[8 : 8 + size], type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(entries.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
            found = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
            tensors = {name: _view(mapped, 8 + size, name, tensor) for name, tensor in found.items()}
            if sum(tensor.nbytes for tensor in tensors.values()) > len(mapped):
                raise ValueError("tensors overlap")
            starts = {name: 8 + size + found[name].data_offsets[0] for name in filter(huge, found)}
            if starts and gives_huge_pages():
                tensors |= _copied(file, {name: tensors[name] for name in starts}, starts)
    except OSError as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), remedy="export the model again") from error
    except (ValueError, msgspec.DecodeError) as error:
        problem = f"not a safetensors file: {error}"
        raise ModelError(problem, where=str(path), remedy="export the model again") from error
    return Container(tensors, metadata)


def gives_huge_pages() -> bool:
    """Whether the kernel gives memory in huge pages to who asks for it."""
    try:
        return "[never]" not in HUGE_PAGES.read_text()
    except OSError:
        return False


def _copied(
    file: BufferedReader, tensors: Mapping[str, np.ndarray], starts: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The same tensors in huge pages; starts: where each begins in the file, from which they are read, since reading
    the mapping would hold its pages too.
    """
    lengths = {name: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in tensors.items()}
    memory = mmap.mmap(-1, sum(lengths.values()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    room = memoryview(memory)
    copied, at = {}, 0
    for name, tensor in tensors.items():
        file.seek(starts[name])
        if file.readinto(room[at : at + tensor.nbytes]) != tensor.nbytes:
            raise ValueError(f"{name}: the file ends within it")
        copied[name] = np.frombuffer(room.toreadonly(), tensor.dtype, tensor.size, at).reshape(tensor.shape)
        at += lengths[name]
    return copied


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
