"""Keys and values in virtual memory, with the processor's own page table as the cache's.

An attention kernel wants a session's keys in one piece, and exact numerics tie the bits to that one call. So a session
gets a piece of address space for a whole context, and memory only where rows were written. Giving pages back, and
letting several sessions see the same pages, changes what lies behind the addresses, never the addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd, lcm

import torch

from protocol.errors import ModelError

MIN_BLOCK = 32  # tokens

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux; Python names neither in all versions
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_off_t = ctypes.c_int64
if sys.platform == "linux":
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, _off_t)
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, _off_t, _off_t)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the keys and values of one token are. heads: key heads."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of one token's keys, or values, in one layer."""
        return self.heads * self.head_dim * self.dtype.itemsize

    @property
    def regions(self) -> int:
        """The keys and the values of each layer."""
        return 2 * self.layers

    @property
    def row_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        return self.regions * self.token_bytes

    @property
    def block(self) -> int:
        """Tokens of a block: its rows fill whole pages in every layer, so that a block can be given back."""
        return lcm(MIN_BLOCK, mmap.PAGESIZE // gcd(mmap.PAGESIZE, self.token_bytes))


class Slab:
    """Keys and values of one session, the key of the token at position p in slot p.

    kv: [layers, 2, heads, slots, head_dim], where the heads of a token lie side by side: a run of tokens is then one
    piece of memory in each of the layers' keys and values, whatever the number of heads. Slots that nobody has
    written read as zero and take no memory. first, top: slots from `first` up to `top` have memory of their own; those
    before `first` are seen through a `Store`.
    Raises ModelError when the system grants no address space.
    """

    def __init__(self, shape: KvShape, slots: int) -> None:
        slots = -(-slots // shape.block) * shape.block
        self.first = self.top = 0
        self._shape = shape
        self._region_bytes = slots * shape.token_bytes
        try:
            # Without a reservation, since what sessions may grow to is many times what they are allowed to take.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._memory = mmap.mmap(-1, shape.regions * self._region_bytes, flags=flags)
        except OSError as error:
            raise ModelError(
                f"no address space for {slots} tokens: {error.strerror}",
                where="KV cache",
                remedy="Lift `ulimit -v`, set vm.overcommit_memory to 0, or lower the context",
            ) from error
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # which would take 2 MiB for the first row of each region
        flat = torch.frombuffer(self._memory, dtype=shape.dtype)
        self._address = flat.data_ptr()
        self.kv = flat.view(shape.layers, 2, slots, shape.heads, shape.head_dim).transpose(2, 3)

    @property
    def own_blocks(self) -> int:
        return max(0, -(-self.top // self._shape.block) - self.first // self._shape.block)

    def move(self, sources: Sequence[int], to: int) -> None:
        """Copy the rows in slots `sources` to consecutive slots from `to` on, in all layers."""
        if list(sources) != list(range(to, to + len(sources))):
            self.kv[:, :, :, to : to + len(sources)] = self.kv[:, :, :, list(sources)]

    def clear(self, start: int) -> None:
        """Zero every slot from `start` on: what lies there must be finite, since padded keys are read."""
        self.kv[:, :, :, start : self.top] = 0

    def trim(self, slots: int) -> None:
        """Give the memory of all blocks behind the first `slots` back to the system."""
        block = self._shape.block
        end = max(self.first, -(-slots // block) * block)
        if self.top > end:
            size = (-(-self.top // block) * block - end) * self._shape.token_bytes
            for at in self._regions(end):
                self._memory.madvise(mmap.MADV_DONTNEED, at, size)
        self.top = min(self.top, slots)

    def see(self, store: Store, at: Place, start: int, end: int) -> None:
        """Show what is stored at `at` in slots start..end, whole blocks, instead of memory of their own."""
        for region, own in enumerate(self._regions(start)):
            store.show(at, region, end - start, self._address + own)
        self._seen_to(end)

    def give(self, store: Store, start: int, end: int) -> Place:
        """Move slots start..end, whole blocks, to a store, and see them there."""
        at, size = store.place(end - start), (end - start) * self._shape.token_bytes
        for region, own in enumerate(self._regions(start)):
            with memoryview(self._memory)[own : own + size] as rows:
                store.write(at, region, rows)
            store.show(at, region, end - start, self._address + own)  # before the next: only one is ever held twice
        self._seen_to(end)
        return at

    def _seen_to(self, end: int) -> None:
        self.first, self.top = end, max(self.top, end)

    def _regions(self, slot: int) -> range:
        """Where `slot` lies in each layer's keys and values, in bytes."""
        first = slot * self._shape.token_bytes
        return range(first, first + self._shape.regions * self._region_bytes, self._region_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where consecutive tokens lie in a store, in bytes. stride: from one layer's keys or values to the next."""

    offset: int
    stride: int
    token_bytes: int

    def behind(self, tokens: int) -> Place:
        return Place(self.offset + tokens * self.token_bytes, self.stride, self.token_bytes)


class Store:
    """Rows that several slabs see: a sparse file without a name that lives in memory.

    A slab that writes into what it sees gets pages of its own (copy on write): no session can change another's past.
    Places are never used twice, since a sparse file costs nothing where it is empty.
    """

    def __init__(self, shape: KvShape) -> None:
        if sys.platform != "linux":
            raise ModelError(
                f"the KV cache needs Linux, this is {sys.platform}",
                where="KV cache",
                remedy="Run the verifier on Linux",
            )
        self._shape = shape
        self._fd = os.memfd_create("outrider-kv", os.MFD_CLOEXEC)
        self._end = 0

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def place(self, tokens: int) -> Place:
        """A new place for so many tokens."""
        at = Place(self._end, tokens * self._shape.token_bytes, self._shape.token_bytes)
        self._end += self._shape.regions * at.stride
        return at

    def write(self, at: Place, region: int, rows: memoryview) -> None:
        if os.pwrite(self._fd, rows, at.offset + region * at.stride) != len(rows):
            raise OSError("rows were stored in part")

    def show(self, at: Place, region: int, tokens: int, address: int) -> None:
        """Map a region's rows at an address, over what is there."""
        size, offset = tokens * self._shape.token_bytes, at.offset + region * at.stride
        flags = mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
        if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._fd, offset) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def free(self, at: Place, tokens: int) -> None:
        """Give the memory of `tokens` rows at a place back to the system; no slab may see them any more."""
        for region in range(self._shape.regions):
            where = (at.offset + region * at.stride, tokens * self._shape.token_bytes)
            if _libc.fallocate(self._fd, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, *where):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return os.fstat(self._fd).st_blocks * 512
