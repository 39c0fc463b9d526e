"""The board's library, with each instruction set that is here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import pytest

from native import board

FAMILIES = {"x86_64": ("scalar", "avx2", "avx512"), "aarch64": ("scalar", "neon", "dotprod")}
SETS = FAMILIES.get(platform.machine(), ("scalar",))


@pytest.fixture(scope="session")
def library() -> tuple[Any, Any]:
    """cffi's (ffi, lib). A machine that cannot have it skips, unless OUTRIDER_REQUIRE_NATIVE is 1."""
    found = board.find()
    if found is None:
        pytest.skip("neither the board's library nor a C compiler is here")
    return found


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, library: tuple[Any, Any]) -> Iterator[str]:
    """The library computes with this set; where OUTRIDER_ISA names one, with that alone."""
    ffi, lib = library
    before = ffi.string(lib.board_isa())
    if os.environ.get("OUTRIDER_ISA", request.param) != request.param:
        pytest.skip(f"OUTRIDER_ISA is {os.environ['OUTRIDER_ISA']}")
    if lib.board_use(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert lib.board_use(before) == 0
