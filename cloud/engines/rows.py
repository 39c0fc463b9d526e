"""Row-wise operations whose result for a row does not depend on the other rows: products over fixed row tiles."""

from __future__ import annotations

from collections.abc import Callable

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


def cut(rows: int, row_tile: int, spans: tuple[int, ...]) -> list[int]:
    """Row counts that add up to `rows` (a multiple of `row_tile`), the largest of `spans` first."""
    cuts = []
    for span in (*sorted(spans, reverse=True), row_tile):
        count, rows = divmod(rows, span)
        cuts += [span] * count
    return cuts


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

    The order in which a kernel sums depends on the shapes alone, so one layer of each shape is tried.
    Raises NumericsError where one tile gives other bits on this many threads than on one.
    """
    threads = torch.get_num_threads()
    found: dict[tuple[int, int, bool], tuple[int, ...]] = {}
    for layer in layers:
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        if shape not in found:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(max(SPANS) * layer.row_tile, layer.in_features, generator=generator)
            x = x.to(layer.weight.dtype)
            tiles = torch.cat([layer.product(part) for part in x.split(layer.row_tile)])
            torch.set_num_threads(1)
            try:
                alone = layer.product(x[: layer.row_tile])
            finally:
                torch.set_num_threads(threads)
            if not torch.equal(alone, tiles[: layer.row_tile]):
                raise NumericsError(
                    f"a {layer.in_features} x {layer.out_features} product gives other bits on {threads} threads",
                    where="numerics.mode",
                    remedy='Use another thread count, or "fast"',
                )
            counts = [span * layer.row_tile for span in SPANS]
            found[shape] = tuple(rows for rows in counts if torch.equal(layer.product(x[:rows]), tiles[:rows]))
        layer.spans = found[shape]
