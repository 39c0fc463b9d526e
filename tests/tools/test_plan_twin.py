"""Plan and twin agree where the plan's assumptions hold: independent guesses, sent at once, without jitter.

The twin plays the runtime's own window, policies and ledger, of which the plan knows nothing.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from edge.config import DraftingConfig
from tools.arrivals import mean_gap_ms
from tools.boards import BOARDS
from tools.modes import MODES
from tools.plan import formulas
from tools.plan.acceptance import Recorded
from tools.plan.synthetic import independent_trace
from tools.twin.fleet import Scene, simulate
from tools.twin.replay import Script, StepTime

STEP_S = 0.06
TEXT = independent_trace(0.8, 600, seed=2)
GUESSES = Recorded(TEXT)
CHAIN = DraftingConfig(policy="chain", lookahead=64, floor=1e-6, paced=False)  # sent at once, as long as it gets


def twin_s(mode: str, board: str, rtt_s: float, drafting: DraftingConfig, devices: int = 1) -> float:
    """Seconds a token from a text's first delivery to its last, mean over the devices."""
    scene = Scene(
        [Script(TEXT)],
        BOARDS[board],
        StepTime(STEP_S),
        drafting,
        patience_s=MODES[mode].patience_s,
        rtt_s=rtt_s,
        devices=devices,
        spread_s=1.0,
    )
    return fmean(mean_gap_ms(story.arrivals) for (story,) in simulate(scene).stories) / 1e3


@pytest.mark.parametrize("rtt_s", [0.02, 0.05, 0.1, 0.15])
@pytest.mark.parametrize("board", sorted(BOARDS))
class TestAgreement:
    def test_cloud_alone(self, board, rtt_s):
        played = twin_s("cloud", board, rtt_s, DraftingConfig(policy="none"))
        assert formulas.cloud_alone(STEP_S).token_s == pytest.approx(played, rel=0.01)

    def test_synchronous(self, board, rtt_s):
        def planned(gamma: int) -> float:
            return formulas.synchronous(GUESSES, BOARDS[board].pass_s, rtt_s, STEP_S, gamma).token_s

        for gamma in (2, formulas.best_gamma(planned)):
            played = twin_s("sync", board, rtt_s, DraftingConfig(policy="sync", gamma=gamma))
            assert planned(gamma) == pytest.approx(played, rel=0.03)

    @pytest.mark.parametrize("mode", ["async", "never_wait"])
    def test_asynchronous_chain(self, board, rtt_s, mode):
        planned = formulas.chain(GUESSES, BOARDS[board].pass_s, rtt_s, STEP_S, MODES[mode].patience_s)
        assert planned.token_s == pytest.approx(twin_s(mode, board, rtt_s, CHAIN), rel=0.06)


@pytest.mark.parametrize("rtt_s", [0.02, 0.15])
def test_a_shared_verifier(rtt_s):
    pass_s, drafting = BOARDS["orin-nano"].pass_s, DraftingConfig(policy="sync", gamma=5)
    planned = formulas.synchronous(GUESSES, pass_s, rtt_s, STEP_S, gamma=5, shared=True)
    assert planned.token_s == pytest.approx(twin_s("sync", "orin-nano", rtt_s, drafting, devices=8), rel=0.03)
    for mode in ("async", "never_wait"):
        planned = formulas.chain(GUESSES, pass_s, rtt_s, STEP_S, MODES[mode].patience_s, shared=True)
        assert planned.token_s == pytest.approx(twin_s(mode, "orin-nano", rtt_s, CHAIN, devices=8), rel=0.06)
