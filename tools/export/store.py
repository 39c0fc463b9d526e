"""Quantised matrices in a file, so that work is not done twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tools.export.quantise import Blocks

FACTS = "bits, group, k, zero steps"


def save(path: Path, blocks: Mapping[str, Blocks]) -> None:
    """Write a safetensors file that appears whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, tuple[int, int, int, int]] = {}
    for name, part in blocks.items():
        arrays |= {f"{name}:packed": part.packed, f"{name}:scales": part.scales}
        if part.zero_points is not None:
            arrays[f"{name}:zero_points"] = part.zero_points
        facts[name] = (part.bits, part.group, part.k, part.zero_steps)
    unfinished = path.with_suffix(".part")
    # One entry, since the library writes several in any order.
    save_file(arrays, unfinished, {FACTS: json.dumps(facts)})
    os.replace(unfinished, path)


def load(path: Path) -> dict[str, Blocks]:
    """What `save` wrote, in the same order."""
    with safe_open(path, framework="np") as file:
        names = set(file.keys())

        def stored(name: str, facts: tuple[int, int, int, int]) -> Blocks:
            bits, group, k, steps = facts
            points = f"{name}:zero_points"
            return Blocks(
                bits=bits,
                group=group,
                k=k,
                packed=file.get_tensor(f"{name}:packed"),
                scales=file.get_tensor(f"{name}:scales"),
                zero_points=file.get_tensor(points) if points in names else None,
                zero_steps=steps,
            )

        return {name: stored(name, facts) for name, facts in json.loads(file.metadata()[FACTS]).items()}
