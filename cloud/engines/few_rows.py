"""Attention for spans of few rows, all sessions in one call a layer: the Python side of native/attention.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from cloud.engines import threads

if TYPE_CHECKING:
    from cloud.engines.ragged import Span

ROWS = 16  # of a span; for more of them a library's products are quicker
QUERIES, WIDTH = 128, 256  # rows times groups, head size: what the source has room for


class _Span(ctypes.Structure):
    _fields_ = (
        ("kv", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("past", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("sees", ctypes.c_char_p),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("spans", ctypes.POINTER(_Span)),
        *((name, ctypes.c_int64) for name in ("num_spans", "layer", "key_heads", "groups", "width")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_row", "key_row", "value_row")),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("next", ctypes.c_int64),
    )


class FewRows:
    """Some spans of a step, in the form that the library takes."""

    def __init__(self, spans: Sequence[Span], groups: int) -> None:
        self._slabs = [span.slab for span in spans]  # alive for as long as their addresses are held
        self._spans = (_Span * len(spans))(
            *(
                _Span(span.slab.kv.data_ptr(), span.slab.kv.shape[3], span.past, span.start, span.rows, _sees(span))
                for span in spans
            )
        )
        self._job = _Job(spans=self._spans, num_spans=len(spans), groups=groups)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """query: [rows, heads, head_dim]; key, value: [rows, key heads, head_dim], of all rows of the pass.

        Puts keys and values of the spans' rows into their slabs. Returns [rows, heads, head_dim]; rows of other spans
        hold anything.
        """
        query, key, value = _side_by_side(query), _side_by_side(key), _side_by_side(value)
        rows, heads, width = query.shape
        out = query.new_empty(rows, heads, width)
        job = self._job
        job.layer, job.key_heads, job.width = layer, key.shape[1], width
        job.query, job.key, job.value, job.out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        job.query_row, job.key_row, job.value_row = query.stride(0), key.stride(0), value.stride(0)
        job.scale = width**-0.5 if scale is None else scale
        work = _work()
        assert work is not None
        threads.run(work, job)
        return out


def rows_at_once(dtype: torch.dtype, groups: int, width: int) -> int:
    """Up to how many rows a span may have here; 0 where the library is not to be had, or not for such a model."""
    if dtype != torch.float32 or groups > QUERIES or width > WIDTH or _work() is None:
        return 0
    return min(ROWS, QUERIES // groups)


def _sees(span: Span) -> bytes | None:
    """[rows][rows] whether a row sees a new row; None for a chain."""
    if span.is_chain:
        return None
    seen = [set(range(i + 1)) for i in range(span.chunk)]
    seen += [{*range(span.chunk), *(span.chunk + j for j in span.lineage(i))} for i in range(len(span.parents))]
    return b"".join(bytes(j in by_row for j in range(span.rows)) for by_row in seen)


def _side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, width], the heads of a row in one piece."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


@cache
def _work() -> Callable[..., None] | None:
    return threads.job_function("attention", "attention_run", _Job)
