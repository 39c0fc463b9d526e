"""The threads of torch's own kernels, for C that runs between them: others would fight with them for the cores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from native import function


def job_function(library: str, name: str, job: type[ctypes.Structure]) -> Callable[..., None] | None:
    """A function(job, GOMP_parallel, threads) of `<library>.c`, to be called by `run`; None where there is none."""
    return function(library, name, ctypes.POINTER(job), ctypes.c_void_p, ctypes.c_uint)


def run(work: Callable[..., None], job: ctypes.Structure) -> None:
    """Do a job on as many threads as torch uses."""
    work(ctypes.byref(job), _run_in_parallel(), torch.get_num_threads())


def are_shared() -> bool:
    """Whether there are such threads; where torch has others than libgomp's, `run` uses the caller's alone."""
    return _run_in_parallel() is not None


@cache
def _run_in_parallel() -> ctypes.c_void_p | None:
    """libgomp's GOMP_parallel(function, argument, threads, flags)."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p)
    return None
