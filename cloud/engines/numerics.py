"""What decides the bits of the logits, and whether this machine can honour a configured choice."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from protocol.errors import ConfigError, NumericsError

Mode = Literal["fast", "exact"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How logits are computed.

    mode: "fast" takes whatever kernel is quickest for a step's shape; "exact" gives a session the same bits in any
    batch, chunking, order and tree. dtype: "" is the dtype that the target's manifest names.
    row_tile: rows that every product is defined over; query_tile: rows of one attention call; key_multiple: keys of
    an attention call are padded to a multiple of it. All three count in exact mode only.
    isa, torch, bits: pinned parts of the numerics id; "" takes what the machine has.
    Raises ConfigError for a value outside its range.
    """

    mode: Mode = "fast"
    dtype: str = ""
    row_tile: int = 8
    query_tile: int = 8
    key_multiple: int = 64
    isa: str = ""
    torch: str = ""
    bits: str = ""

    def __post_init__(self) -> None:
        if self.mode not in ("fast", "exact"):
            raise ConfigError(f"mode {self.mode!r} is not known", where="numerics", remedy='Use "fast" or "exact"')
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not known", where="numerics", remedy=f"Use one of {', '.join(DTYPES)}"
            )
        for name, low in (("row_tile", 2), ("query_tile", 1), ("key_multiple", 16)):
            value = getattr(self, name)
            if not low <= value <= 1024 or value % low:
                raise ConfigError(f"{name} {value} is not a multiple of {low} in {low}..1024", where="numerics")

    @property
    def exact(self) -> bool:
        return self.mode == "exact"


def torch_version() -> str:
    """The library's version without its build suffix, e.g. "2.13.0"."""
    return torch.__version__.split("+")[0]


def isa(dtype: str) -> str:
    """The instruction set that products of `dtype` use here, e.g. "avx512", or "avx512amx" for bfloat16 on tiles."""
    base = torch.backends.cpu.get_cpu_capability().lower()
    if dtype != "bfloat16" or not base.startswith("avx"):
        return base
    if torch.cpu._is_amx_tile_supported():
        return f"{base}amx"
    return f"{base}bf16" if torch.cpu._is_avx512_bf16_supported() else base


def check_pins(numerics: Numerics, dtype: str) -> None:
    """Raise NumericsError where a pinned instruction set or library version is not what this machine has."""
    for name, pinned, here in (("isa", numerics.isa, isa(dtype)), ("torch", numerics.torch, torch_version())):
        if pinned and pinned != here:
            raise NumericsError(
                f"{name} is pinned to {pinned!r} but this machine has {here!r}",
                where=f"numerics.{name}",
                remedy="Run this target on a machine like the others of its fleet, or drop the pin",
            )


def check_bits(numerics: Numerics, bits: str) -> None:
    """Raise NumericsError where the digest of this machine's own logits is not the pinned one."""
    if numerics.bits and numerics.bits != bits:
        raise NumericsError(
            f"bits are pinned to {numerics.bits!r} but this machine computes {bits!r}",
            where="numerics.bits",
            remedy="Its kernels sum in another order: run this target on a machine like the others of its fleet",
        )


def numerics_id(numerics: Numerics, dtype: str, bits: str = "") -> str:
    """E.g. "fast-float32", or "exact-float32-r8-q8-k64-avx512-torch2.13.0-5be1f00d".

    bits: digest of the logits that this machine computes for a fixed probe. Equal settings can still mean other bits
    on another machine (kernel libraries choose their blocking by cache size), and this shows it.
    """
    if not numerics.exact:
        return f"fast-{dtype}"
    tiles = f"r{numerics.row_tile}-q{numerics.query_tile}-k{numerics.key_multiple}"
    return f"exact-{dtype}-{tiles}-{isa(dtype)}-torch{torch_version()}-{bits}"
