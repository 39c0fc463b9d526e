"""Row-wise operations whose result for a row does not depend on the other rows: products over fixed row tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

from protocol.errors import NumericsError

# How many row tiles one kernel call may span, where that is found to give the bits of single tiles.
SPANS = (2, 3, 4, 5, 6, 8, 16)

# Elementwise kernels run a call of at most this many elements on one thread, from its start.
ONE_THREAD_ELEMENTS = 32768

# Two vectors of the widest registers in the narrowest dtype; a call's remainder goes through other, scalar code.
VECTOR_ELEMENTS = 64


class PackedLinear(nn.Module):
    """A linear layer with its weight in oneDNN's blocked layout where this build of torch has it.

    Blocked weights spare the kernel a reordering a call, and its order of summation depends far less on the number
    of rows than that of the library behind `F.linear`.
    """

    def __init__(self, linear: nn.Linear, row_tile: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight  # [out, in]
        self.packed = has_packed_linear()
        if self.packed:
            self.weight = nn.Parameter(
                torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), row_tile), requires_grad=False
            )

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out] in one kernel call."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class TiledLinear(PackedLinear):
    """A linear layer defined over tiles of exactly `row_tile` rows, the last one padded.

    spans: row counts above one tile at which a single kernel call was found to give the bits of single tiles.
    """

    def __init__(self, linear: nn.Linear, row_tile: int) -> None:
        super().__init__(linear, row_tile)
        self.row_tile = row_tile
        self.spans: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)  # [rows, in]
        rows = flat.shape[0]
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        padding = -rows % self.row_tile
        if padding:
            flat = F.pad(flat, (0, 0, 0, padding))
        cuts = cut(rows + padding, self.row_tile, self.spans)
        out = self.product(flat) if len(cuts) == 1 else torch.cat([self.product(part) for part in flat.split(cuts)])
        return out[:rows].reshape(*x.shape[:-1], self.out_features)


@lru_cache(maxsize=1024)
def cut(rows: int, row_tile: int, spans: tuple[int, ...]) -> tuple[int, ...]:
    """Row counts that add up to `rows` (a multiple of `row_tile`), the largest of `spans` first."""
    cuts: list[int] = []
    for span in (*sorted(spans, reverse=True), row_tile):
        count, rows = divmod(rows, span)
        cuts += [span] * count
    return tuple(cuts)


class TiledActivation(nn.Module):
    """An elementwise function called so that every element goes through the vector code, in any batch."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        if width % VECTOR_ELEMENTS:
            raise NumericsError(
                f"a layer is {width} wide, which is not a multiple of {VECTOR_ELEMENTS}",
                where="numerics.mode",
                remedy='Use "fast" for this model',
            )
        flat = x.reshape(-1, width)
        if flat.numel() <= ONE_THREAD_ELEMENTS:
            return self.function(flat).reshape(x.shape)
        parts = flat.split(max(1, ONE_THREAD_ELEMENTS // width))
        return torch.cat([self.function(part) for part in parts]).reshape(x.shape)


def has_packed_linear() -> bool:
    """Whether this build of torch multiplies by weights in a blocked layout."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def replace_modules(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> list[nn.Module]:
    """Replace each module for which `make` returns another one; returns the new ones."""
    made = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = make(child)
            if new is not None:
                setattr(parent, name, new)
                made.append(new)
    return made


def find_spans(layers: list[TiledLinear]) -> None:
    """Set `spans` of every layer by comparing kernel calls over several tiles with calls over one, to the bit.

    Kernels choose their order of summation by shape alone, so one probe stands for all layers of a shape.
    Raises NumericsError where the bits of a tile depend on the number of threads or on a row's place in the tile.
    """
    found: dict[tuple[int, int, bool], tuple[int, ...]] = {}
    for layer in layers:
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        if shape not in found:
            found[shape] = _spans_of(*shape, layer.row_tile, layer.weight.dtype)
        layer.spans = found[shape]


def _spans_of(width: int, out: int, bias: bool, tile: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The spans for products of one shape.

    The probe's true results are all zero: every term has its opposite somewhere in the sum. What comes out is the
    rounding error of the order of summation and nothing else, which even bfloat16 cannot round away.
    """
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(width // 2 * 2, generator=generator)
    terms = torch.randn(min(out, 256), width // 2, generator=generator).to(dtype)
    with torch.device("meta"):
        linear = nn.Linear(width, out, bias=bias, dtype=dtype)
    weight = torch.zeros(terms.shape[0], width, dtype=dtype)
    weight[:, order] = torch.cat([terms, -terms], 1)
    linear.weight = nn.Parameter(weight.repeat(-(-out // len(weight)), 1)[:out].contiguous(), requires_grad=False)
    if bias:
        linear.bias = nn.Parameter(torch.zeros(out, dtype=dtype), requires_grad=False)
    half = torch.randn(max(SPANS) * tile, width // 2, generator=generator).to(dtype)
    x = torch.zeros(len(half), width, dtype=dtype)  # [rows, in]
    x[:, order] = torch.cat([half, half], 1)

    probe = TiledLinear(linear, tile)
    tiles = torch.cat([probe.product(part) for part in x.split(tile)])  # [rows, out]
    turned = probe.product(x[:tile].roll(1, 0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = probe.product(x[:tile])
    finally:
        torch.set_num_threads(threads)
    for how, same in (
        (f"on {threads} threads than on one", torch.equal(alone, tiles[:tile])),
        ("in another row", torch.equal(turned.roll(-1, 0), tiles[:tile])),
    ):
        if not same:
            raise NumericsError(
                f"a product of {width} x {out} has other bits {how}",
                where="numerics.mode",
                remedy='Try another row_tile or number of threads, or use "fast"',
            )
    return tuple(span * tile for span in SPANS if torch.equal(probe.product(x[: span * tile]), tiles[: span * tile]))
