"""Memory of an NVIDIA GPU, through CUDA's runtime library alone: a board needs neither torch nor another package."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.drafters.qdq import MOST_ROWS, Shape, padded
from protocol.errors import ModelError

LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
TOOLKIT = Path("/usr/local/cuda/lib64")  # where JetPack has it, which not every linker's configuration names
ALIGNMENT = 256  # of tensors, as TensorRT wants them
HALF = 2  # bytes

# cudaMemcpyKind and cudaDeviceAttr of driver_types.h
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
MAJOR, MINOR = 75, 76


@cache
def library() -> ctypes.CDLL:
    """CUDA's runtime. Raises ModelError where it is not installed."""
    for name in (*LIBRARIES, *(str(TOOLKIT / name) for name in LIBRARIES)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ModelError(
        "CUDA's runtime library (libcudart) is not installed",
        where="CUDA",
        remedy="On a Jetson: sudo apt install nvidia-jetpack; or draft with the processor: --runtime onnx",
    )


def call(name: str, *arguments: Any) -> None:
    """One function of CUDA's runtime. Raises ModelError, with its words, where it does not succeed."""
    runtime = library()
    if status := getattr(runtime, name)(*arguments):
        words = runtime.cudaGetErrorString
        words.restype = ctypes.c_char_p
        raise ModelError(
            f"{name}: {words(status).decode(errors='replace')} ({status})",
            where="CUDA",
            remedy="Look at the driver and at what else has the GPU: sudo dmesg, tegrastats or nvidia-smi",
        )


def compute_capability(device: int) -> str:
    """As "8.7". Raises ModelError where there is no such GPU."""
    values = []
    for attribute in (MAJOR, MINOR):
        value = ctypes.c_int()
        call("cudaDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(device))
        values.append(value.value)
    return "{}.{}".format(*values)


class Stream:
    """Work of one GPU, done in its order."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.use()
        self._handle = ctypes.c_void_p()
        call("cudaStreamCreate", ctypes.byref(self._handle))

    def use(self) -> None:
        """Make its GPU the calling thread's."""
        call("cudaSetDevice", ctypes.c_int(self._device))

    @property
    def handle(self) -> int:
        return self._handle.value or 0

    def copy(self, to: int, source: int, size: int, kind: int) -> None:
        """size: bytes."""
        places = ctypes.c_void_p(to), ctypes.c_void_p(source)
        call("cudaMemcpyAsync", *places, ctypes.c_size_t(size), ctypes.c_int(kind), self._handle)

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """`rows` pieces of `width` bytes on the device, each a pitch behind the one before."""
        call(
            "cudaMemcpy2DAsync", ctypes.c_void_p(to), ctypes.c_size_t(to_pitch), ctypes.c_void_p(source),
            ctypes.c_size_t(source_pitch), ctypes.c_size_t(width), ctypes.c_size_t(rows), ctypes.c_int(ON_DEVICE),
            self._handle,
        )  # fmt: skip

    def wait(self) -> None:
        call("cudaStreamSynchronize", self._handle)


def _freed_with(owner: object, free: Callable[..., Any], pointer: ctypes.c_void_p) -> None:
    """But not at the process's end, when the driver may be gone already; it frees everything itself."""
    weakref.finalize(owner, free, pointer).atexit = False


class Memory:
    """Bytes on the GPU, zero at first. They live as long as this object."""

    def __init__(self, size: int) -> None:
        pointer = ctypes.c_void_p()
        call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        self.address = pointer.value or 0
        _freed_with(self, library().cudaFree, pointer)
        call("cudaMemset", pointer, ctypes.c_int(0), ctypes.c_size_t(size))


class Pinned:
    """An array in the host's memory that the GPU writes to directly. It lives as long as this object."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        pointer = ctypes.c_void_p()
        size = int(np.prod(shape))
        call("cudaHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size * 4), ctypes.c_uint(0))
        _freed_with(self, library().cudaFreeHost, pointer)
        numbers = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        self.array = np.ctypeslib.as_array(numbers, (size,)).reshape(shape)


class DeviceCache:
    """A `Cache` on the GPU: what a pass leaves and what `keep` moves never comes to the host."""

    device = "cuda"

    def __init__(self, shape: Shape, capacity: int, stream: Stream) -> None:
        self._shape, self._stream = shape, stream
        self._slot = shape.row * HALF  # bytes
        self._pitch = aligned(padded(capacity) * self._slot)
        self._slots = Memory(shape.planes * self._pitch)
        self._latest = Memory(shape.planes * MOST_ROWS * self._slot)
        self.latest = self._latest.address

    def plane(self, number: int) -> int:
        return self._slots.address + number * self._pitch

    def take(self, start: int, rows: int) -> None:
        width = rows * self._slot
        to = self._slots.address + start * self._slot
        self._stream.copy_rows(to, self._pitch, self.latest, width, width, self._shape.planes)

    def move(self, slots: Sequence[int], first: int) -> None:
        """Slot by slot, in order: no row is overwritten before it was moved itself, as each goes down or stays."""
        for to, slot in enumerate(slots, first):
            if slot != to:
                there, here = (self._slots.address + place * self._slot for place in (to, slot))
                self._stream.copy_rows(there, self._pitch, here, self._pitch, self._slot, self._shape.planes)

    def settle(self) -> None:
        self._stream.wait()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
