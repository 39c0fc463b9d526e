"""On another processor the same tokens are drawn, and the native drafter has the same bits."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from edge.drafters import golden, manifest, runtimes
from edge.drafters.rank import by_twin, rank
from native import board
from protocol.sampling import Sampling
from tests.arm import golden as other

FOLDER = os.environ.get("OUTRIDER_ARM_GOLDEN")
if FOLDER is None:
    pytest.skip("made and run by `make test-arm`", allow_module_level=True)

HERE = Path(FOLDER)
CASES = other.read(HERE)


def drafter(name: str) -> Path:
    directory = Path(os.environ.get("OUTRIDER_ARM_DRAFTERS", HERE), name)
    if not directory.exists():
        pytest.skip(f"no {name} drafter of SmolLM2 is here")
    return directory


def test_the_library_that_the_wheel_brought_runs_here() -> None:
    ffi, lib = board.load()
    assert board.SHIPPED.exists()
    asked = os.environ.get("OUTRIDER_ISA")
    best = "dotprod" if platform.machine() == "aarch64" else ffi.string(lib.board_isa()).decode()
    assert ffi.string(lib.board_isa()).decode() == (asked or best)


@pytest.mark.parametrize("ranks", [rank, by_twin], ids=["c", "twin"])
def test_the_same_tokens_are_drawn(ranks) -> None:
    found = [ranks(*case, 8)[0].tolist() for case in other.every(other.rows(HERE))]
    assert found == CASES.ranked


def test_the_native_drafter_has_the_same_bits_and_draws_the_same() -> None:
    directory = drafter("native")
    facts = manifest.read(directory, "drafter")
    expected = np.load(HERE / other.DRAFTER)
    num = int(os.environ.get("OUTRIDER_ARM_TOKENS", len(expected)))
    greedy, drawn, logits = other.text(runtimes.load(directory), facts.golden.prompt, num)
    np.testing.assert_array_equal(logits, expected[:num])
    assert (greedy, drawn) == (CASES.greedy[:num], CASES.drawn[:num])


@pytest.mark.parametrize("name", ["level1", "level4"])
def test_onnx_runtime_computes_the_drafter_here(name: str) -> None:
    """Level 4 has other kernels on ARM, with other rounding: it may prefer others where it is not sure."""
    directory = drafter(name)
    made = runtimes.load(directory)
    whole = manifest.read(directory, "drafter").golden
    short = golden.Golden(whole.prompt, whole.ids[:4], tuple(place for place in whole.sure if place < 4))
    wrong = golden.wrong(made, short)
    assert len(wrong) <= (0 if name == "level1" else len(short.sure) // 2)
    row = made.prefill(whole.prompt)
    for sampling in (Sampling(), other.DRAWN):
        ids = [one.id for one in made.candidates(row, sampling, 4)]
        assert ids == by_twin(made.logits(row), row.position + 1, sampling, 4)[0].tolist()
