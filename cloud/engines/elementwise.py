"""What a transformer block does to rows between its products: by torch, or quicker in C (native/elementwise.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

from native import function


class Torch:
    """The twin: any dtype, and in exact numerics the same bits for a row in any company."""

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x: [rows, width], each row over the root of its mean square, times weight [width]."""
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def rotate(rows: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The first `heads` heads of rows [rows, all heads, head_dim], turned; rows itself may be changed.

        cos, sin: [rows, 1, head_dim], the first half of sin negated.
        """
        turned = rows[:, :heads]
        return (turned * cos).add_(turned.roll(turned.shape[-1] // 2, -1).mul_(sin))


class Native:
    """Dense float32 rows, in one call of a library each."""

    def __init__(self, norm: Callable[..., None], rotate: Callable[..., None]) -> None:
        self._norm, self._rotate = norm, rotate

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def rotate(self, rows: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        count, all_heads, width = rows.shape
        self._rotate(rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), count, all_heads * width, heads, width)
        return rows[:, :heads]


@cache
def native() -> Native | None:
    """The library, where it can be had."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    norm = function("elementwise", "elementwise_norm", pointer, pointer, pointer, number, number, ctypes.c_float)
    rotate = function("elementwise", "elementwise_rotate", pointer, pointer, pointer, number, number, number, number)
    return None if norm is None or rotate is None else Native(norm, rotate)


def quickest(dtype: torch.dtype, exact: bool) -> Torch | Native:
    return (native() if dtype == torch.float32 and not exact else None) or Torch()
