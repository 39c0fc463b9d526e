"""The board's library under sanitizers, for seconds; `make sanitize` takes longer."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import click
import pytest

from native import board
from tests.native import sanitized
from tools.models import ROOT

OVERFLOW = """
import numpy as np
from native import board
ffi, lib = board.load()
words, numbers = ffi.new("uint32_t[100]"), np.empty(50)
lib.noise_of(words, 51, ffi.from_buffer("double[]", numbers))
"""


@cache
def environment() -> dict[str, str]:
    try:
        return sanitized.environment()
    except (board.NativeError, click.ClickException) as error:
        pytest.skip(f"no sanitizers: {error}")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)


def test_random_inputs_find_nothing() -> None:
    done = run("-m", "tests.native.sanitized", "--here", "--tries", "300")
    assert done.returncode == 0, done.stderr


def test_a_number_too_many_is_found() -> None:
    done = run("-c", OVERFLOW)
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr
