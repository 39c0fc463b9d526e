"""The threads of torch's own kernels, for C that runs between them: others would fight with them for the cores."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def run_in_parallel() -> ctypes.c_void_p | None:
    """libgomp's GOMP_parallel(function, argument, threads, flags); None where torch has other threads."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p)
    return None
