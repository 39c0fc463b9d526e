"""Rounding that compensates its own errors (GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323).

The columns of a matrix are rounded one after the other, and what a column's rounding changed in the products is taken
up by the columns that are still to come, as the second moments of the inputs allow. Scales and zero points are chosen
before, by the weights' importance, so the order of the columns, the most important first, leaves the layout plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tools.export.quantise import Blocks, fit, pack

DAMPING = 0.01  # of the mean second moment, added to each: inputs that the calibration text never had stay harmless
COLUMNS = 128  # that are rounded before the columns behind them hear of it
ROWS = 1024  # at a time, so that the columns in work stay in the processor's cache


def damped(moments: torch.Tensor, share: float = DAMPING) -> torch.Tensor:
    """Second moments [k, k] with `share` of their mean added to the diagonal."""
    return moments + torch.eye(len(moments)) * (share * float(moments.diagonal().mean()))


def round_matrix(
    weight: torch.Tensor,
    moments: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    zero_steps: int = 1,
    *,
    positive: bool = False,
) -> Blocks:
    """Quantise weight [n, k] so that its products with inputs of second moments [k, k] change little.

    positive: as for `quantise.fit`.
    """
    k = weight.shape[1]
    moments = damped(moments)
    order = moments.diagonal().argsort(descending=True)
    upper = _inverse_factor(moments[order][:, order])
    importance = torch.nn.functional.pad(moments.diagonal(), (0, -k % group)).reshape(-1, group)

    def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        padded = torch.nn.functional.pad(rows, (0, -k % group)).reshape(len(rows), -1, group)
        levels, scales, zeros = fit(padded, bits, symmetric, importance, zero_steps, positive=positive)
        columns = levels.reshape(len(rows), -1).T.contiguous()  # padding keeps the level of zero
        columns[order] = _round_columns(rows.T[order], scales.T, zeros.T, order // group, upper, (1 << bits) - 1)
        return columns.T.reshape(levels.shape), scales, zeros

    with one_thread():
        parts = [round_rows(rows.float()) for rows in weight.split(ROWS)]
    levels, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return pack(levels, scales, None if symmetric else zeros, bits, k, zero_steps)


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small steps: threads that wait for each other at each of them cost far more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round_columns(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_of: torch.Tensor,
    upper: torch.Tensor,
    top: int,
) -> torch.Tensor:
    """uint8 levels [k, n] of weight [k, n], changed in place, with scales and zeros [groups, n]."""
    levels = torch.empty(weight.shape, dtype=torch.uint8)
    divisors, zeros = torch.where(scales == 0, 1.0, scales).contiguous(), zeros.contiguous()
    groups = group_of.tolist()
    for start in range(0, len(weight), COLUMNS):
        end = min(start + COLUMNS, len(weight))
        errors = torch.empty(end - start, weight.shape[1])
        for column in range(start, end):
            scale, zero = divisors[groups[column]], zeros[groups[column]]
            level = (weight[column] / scale).add_(zero).round_().clamp_(0, top)
            levels[column] = level
            error = (weight[column] - (level - zero) * scale) / upper[column, column]
            weight[column + 1 : end].addr_(upper[column, column + 1 : end], error, alpha=-1)
            errors[column - start] = error
        weight[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return levels


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper triangular U with U^T U = moments^-1, both [k, k]."""
    # Reversing rows and columns turns the lower factor of the matrix into the upper one that U is the inverse of.
    lower = torch.linalg.cholesky(moments.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(lower, torch.eye(len(moments)), upper=True)
