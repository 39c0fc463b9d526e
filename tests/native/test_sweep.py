"""The sweep over all words of the noise names those that one of its three makes another number of."""

from __future__ import annotations

import numpy as np
import pytest

from native import board
from tests.protocol.draws import HARD_WORDS

pytest.importorskip("torch", reason="one of the three is torch's")
from tests.native import sweep

pytestmark = pytest.mark.skipif(board.find() is None, reason="the board's library is not here")
HARD = HARD_WORDS[0][0]
START = HARD - HARD % sweep.PART


def test_nothing_differs() -> None:
    assert [part.size for part in sweep.sweep([0, START // sweep.PART, (1 << 32) // sweep.PART - 1], 2)] == [0, 0, 0]


@pytest.mark.parametrize("where", ["gumbel_of", "sampling.gumbel_of"])
def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    module, name = (sweep.sampling, "gumbel_of") if "." in where else (sweep, where)
    right = getattr(module, name)

    def wrong(words):
        made = right(words)
        made[HARD - START] += 2.0**-20
        return made

    monkeypatch.setattr(module, name, wrong)
    assert np.array_equal(sweep.differing(START), [HARD])
