"""What a drafter on a GPU is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def silence(*_: Any) -> None:
    """For a build that nobody waits for."""


@dataclass(frozen=True)
class Accelerator:
    """device: the GPU's number; engines: where those that TensorRT builds are kept; fp16: whether ONNX Runtime's
    TensorRT provider may compute in it; told: called with what a build is doing and the share of it that is done.
    """

    device: int = 0
    engines: Path = Path("/var/lib/outrider/engines")
    fp16: bool = True
    told: Callable[[str, float], None] = silence
