"""Block quantisation of a weight matrix, in the layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

# Scales to try, of the one that spans the group: clipping its outliers a little often costs less than a coarser step.
SHRINK = (1.0, 0.96, 0.91, 0.85, 0.78)
CHUNK = 1 << 17  # values at a time: the search then stays in the processor's cache, 3 times faster


@dataclass(frozen=True)
class Blocks:
    """A matrix [n, k] in groups along k: w = (q - zero) * scale; zero is 2^(bits-1) where zero_points is None.

    packed: uint8 [n, groups, group * bits / 8], low bits first. scales: float32 [n, groups], each a float16 number, so
    that a runtime that stores 16 bits computes with the same one.
    zero_points: in steps of 1 / zero_steps: uint8 [n, ceil(groups * bits / 8)], low bits first; [n, groups], a byte
    each, where a level has several steps.
    """

    bits: int
    group: int
    k: int
    packed: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    zero_steps: int = 1

    @property
    def n(self) -> int:
        return int(self.packed.shape[0])


def quantise(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, zero_steps: int = 1, *, positive: bool = False
) -> Blocks:
    """Quantise [n, k], choosing for each group the scale of least squared error among a few clippings."""
    n, k = weight.shape
    parts = []
    step = max(1, CHUNK // k)
    for start in range(0, n, step):
        rows = torch.nn.functional.pad(weight[start : start + step].float(), (0, -k % group))
        groups = rows.reshape(rows.shape[0], -1, group)
        q, scale, zero = fit(groups, bits, symmetric, zero_steps=zero_steps, positive=positive)
        parts.append(pack(q, scale, None if symmetric else zero, bits, k, zero_steps))
    return concatenate(parts)


def pack(
    q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, k: int, zero_steps: int = 1
) -> Blocks:
    """Blocks of levels q [n, groups, group], scales [n, groups] and zero points [n, groups]."""
    points = None if zeros is None else (zeros * zero_steps).round().to(torch.uint8)
    return Blocks(
        bits=bits,
        group=q.shape[2],
        k=k,
        packed=_pack(q.to(torch.uint8), bits).numpy(),
        scales=scales.half().float().numpy(),
        zero_points=None if points is None else _pack(points, bits if zero_steps == 1 else 8).numpy(),
        zero_steps=zero_steps,
    )


def concatenate(parts: Sequence[Blocks]) -> Blocks:
    """Matrices of one kind below each other: groups run along k, so rows stay as they are."""
    zeros = [part.zero_points for part in parts if part.zero_points is not None]
    return replace(
        parts[0],
        packed=np.concatenate([part.packed for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zero_points=np.concatenate(zeros) if zeros else None,
    )


def take(blocks: Blocks, rows: slice | np.ndarray) -> Blocks:
    """Some rows of a matrix."""
    zeros = None if blocks.zero_points is None else blocks.zero_points[rows]
    return replace(blocks, packed=blocks.packed[rows], scales=blocks.scales[rows], zero_points=zeros)


def dequantise(blocks: Blocks) -> torch.Tensor:
    """The float32 matrix [n, k] that the graph computes with."""
    values = levels(blocks) * torch.from_numpy(blocks.scales)[:, :, None]
    return values.reshape(blocks.n, -1)[:, : blocks.k]


def levels(blocks: Blocks) -> torch.Tensor:
    """Every weight in scales, zero points taken off: float16 [n, groups, group], which holds them exactly."""
    q = _unpack(torch.from_numpy(blocks.packed), blocks.bits, blocks.group).half()
    return q - torch.from_numpy(zeros(blocks)).half()[:, :, None]


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> torch.Tensor:
    """What [n, k] becomes with so many bits, 2 to 8, in float32: as `dequantise(quantise(...))`, for bits too that
    no layout holds.
    """
    n, k = weight.shape
    made = torch.empty(n, k)
    step = max(1, CHUNK // k)
    for start in range(0, n, step):
        rows = torch.nn.functional.pad(weight[start : start + step].float(), (0, -k % group))
        q, scale, zero = fit(rows.reshape(rows.shape[0], -1, group), bits, symmetric)
        values = (q.float() - zero[:, :, None]) * scale[:, :, None]
        made[start : start + step] = values.flatten(1)[:, :k]
    return made


def zeros(blocks: Blocks) -> np.ndarray:
    """Every group's zero point, float32 [n, groups]."""
    if blocks.zero_points is None:
        return np.full(blocks.scales.shape, 1 << (blocks.bits - 1), np.float32)
    bits = blocks.bits if blocks.zero_steps == 1 else 8
    points = _unpack(torch.from_numpy(blocks.zero_points), bits, blocks.scales.shape[1])
    return points.float().div_(blocks.zero_steps).numpy()


def fit(
    groups: torch.Tensor,
    bits: int,
    symmetric: bool,
    importance: torch.Tensor | None = None,
    zero_steps: int = 1,
    *,
    positive: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """uint8 levels [rows, groups, group], scale (a float16 number in float32) and zero [rows, groups], float32.

    importance: [groups, group], weights of the squared errors; all the same where it is not given. positive: no scale
    is negative, for runtimes that take no other; without zero points that costs a little.
    """
    top = (1 << bits) - 1
    weighted = groups if importance is None else groups * importance

    def project(span: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Levels less the zero point, their product with the weights, and with themselves."""
        level = groups / torch.where(span == 0, 1.0, span)[:, :, None]
        level = level.add_(zero[:, :, None]).round_().clamp_(0, top).sub_(zero[:, :, None])
        along = (weighted * level).sum(2)
        return level, along, (level * level if importance is None else level * level * importance).sum(2)

    best_span, best_zero = torch.zeros(groups.shape[:2]), torch.zeros(groups.shape[:2])
    most = torch.full(groups.shape[:2], -1.0)
    for span, zero in _spans(groups, bits, symmetric, zero_steps, positive):
        # For fixed levels the scale of least squares is <w, level> / <level, level>; it explains this much of <w, w>.
        _, along, norm = project(span, zero)
        explained = along.square().div_(norm.clamp(min=1e-30))
        better = explained > most
        most = torch.where(better, explained, most)
        best_span, best_zero = torch.where(better, span, best_span), torch.where(better, zero, best_zero)
    level, along, norm = project(best_span, best_zero)
    scale = torch.where(norm > 0, along / norm.clamp(min=1e-30), best_span)
    return level.add_(best_zero[:, :, None]).to(torch.uint8), scale.half().float(), best_zero


def _spans(
    groups: torch.Tensor, bits: int, symmetric: bool, zero_steps: int, positive: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zeros [rows, groups] to try. 8 bits leave nothing to gain from clipping."""
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        # The largest magnitude goes to level 0, the one level without a mirror image.
        extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
        whole = extreme.abs() / (middle - 1) if positive else extreme / -middle
        for share in SHRINK if bits <= 4 else (1.0,):
            yield whole * share, torch.full_like(extreme, middle)
        return
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    for share in SHRINK if bits <= 4 else (1.0,):
        scale = ((high - low) * (share / top)).clamp_(min=1e-12)
        middle_level = top / 2 - (high + low) / 2 / scale
        yield scale, middle_level.mul_(zero_steps).round_().div_(zero_steps).clamp_(0, top)


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last axis, `8 / bits` values a byte, the first in the low bits."""
    per_byte = 8 // bits
    if per_byte == 1:
        return values.contiguous()
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_byte))
    low, high = values[..., 0::2], values[..., 1::2]
    return (low | (high << 4)).contiguous()


def _unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    if bits == 8:
        return packed
    pairs = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return pairs.reshape(*packed.shape[:-1], -1)[..., :count]
