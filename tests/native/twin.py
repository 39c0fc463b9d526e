"""What the C computes, in NumPy, operation by operation."""

from __future__ import annotations

import numpy as np

from tools.export.quantise import Blocks, zeros

MOST = np.float32(32639)
LEAST = np.float32(1e-30)


def fixed(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Block fixed point of float32 [rows, k]: int64 [rows, groups, group] and float32 scales [rows, groups]."""
    groups = x.reshape(len(x), -1, group)
    peak = np.abs(groups).max(2)
    some = peak > LEAST
    safe = np.where(some, peak, np.float32(1))
    inverse = np.where(some, MOST / safe, np.float32(0))
    return np.rint(groups * inverse[:, :, None]).astype(np.int64), np.where(some, safe / MOST, np.float32(0))


def product(x: np.ndarray, blocks: Blocks, bias: np.ndarray) -> np.ndarray:
    """float32 [rows, n]: exact integers in each group, then one rounded step after the other."""
    a, row_scales = fixed(x, blocks.group)
    per_byte = 8 // blocks.bits
    levels = np.stack([blocks.packed >> (blocks.bits * i) & (1 << blocks.bits) - 1 for i in range(per_byte)], axis=-1)
    steps = 16 if blocks.bits == 4 else 1
    points = (zeros(blocks) * steps).astype(np.int64)
    weights = levels.reshape(blocks.n, -1, blocks.group).astype(np.int64) * steps - points[:, :, None]
    y = np.zeros((len(x), blocks.n), np.float32)
    for g in range(weights.shape[1]):
        exact = (a[:, g] @ weights[:, g].T).astype(np.float32)
        y = y + exact * (blocks.scales[:, g] * (row_scales[:, g, None] * np.float32(1 / steps)))
    return y + bias
