"""Linear layers for the dozens of rows that a step has: the Python side of native/product.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from cloud.engines import threads
from cloud.engines.huge_pages import Arena

PANEL = 32  # outputs side by side in the source's layout


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "out", "x_row", "next")),
    )


class PanelLinear(nn.Module):
    """A float32 linear layer whose outputs are sums in a fixed order: a row has the same bits in any company, on any
    number of threads, and wherever multiply-adds are fused.
    """

    def __init__(self, linear: nn.Linear, arena: Arena) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        panels = arena.zeros(panels_shape(linear), linear.weight.dtype)
        for panel, part in zip(panels, linear.weight.detach().split(PANEL), strict=True):
            panel[:, : len(part)] = part.T
        self.weight = nn.Parameter(panels, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        bias = None if self.bias is None else self.bias.data_ptr()
        sizes = len(rows), self.in_features, self.out_features, rows.stride(0)
        job = _Job(rows.data_ptr(), self.weight.data_ptr(), bias, y.data_ptr(), *sizes)
        work = _work()
        assert work is not None
        threads.run(work, job)
        return y


def has_panels(dtype: torch.dtype) -> bool:
    """Whether there are such layers here: on one thread alone they would be slow."""
    return dtype == torch.float32 and threads.are_shared() and _work() is not None


def panels_shape(linear: nn.Linear) -> tuple[int, int, int]:
    """[panels, in, PANEL]: the last panel is filled up with zeros."""
    return -(-linear.out_features // PANEL), linear.in_features, PANEL


@cache
def _work() -> Callable[..., None] | None:
    return threads.job_function("product", "product_run", _Job)
