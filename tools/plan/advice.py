"""The plan itself: every mode's figures for one board, link and verifier, and what they advise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite
from statistics import fmean

from tools.boards import BoardTiming
from tools.plan import formulas
from tools.plan.acceptance import Acceptance
from tools.plan.formulas import Pace
from tools.plan.roofline import Verifier

MODES = ("cloud", "sync", "async", "never_wait")
WORTH_IT = 0.99  # of plain streaming's time or steps: what is closer to it is not worth a board's energy
PATIENCE_STEPS = 24  # of the grid of finite patiences
CHAIN_FLOOR = 0.05  # the path probability at which the board's chain policy stops by default


@dataclass(frozen=True)
class Setting:
    """What a plan is made for.

    acceptances: one a text, of which the mean counts; devices: boards on the verifier, whose step is timed with a row
    of each; usd_per_hour: of one verifier; slack: how much slower than the quickest patience a thriftier one may be, as
    a share; stretch: how much longer a shared step may last than a single session's, as a factor; context: tokens.
    """

    board: BoardTiming
    rtt_s: float
    verifier: Verifier
    acceptances: Sequence[Acceptance]
    usd_per_hour: float = 2.0
    context: int = 2000
    devices: int = 1
    slack: float = 0.05
    stretch: float = 1.1

    @property
    def step_s(self) -> float:
        return self.verifier.step_s(self.devices, self.devices)

    @property
    def shared(self) -> bool:
        return self.devices > 1

    @property
    def alpha(self) -> float:
        return fmean(a.alpha for a in self.acceptances)


@dataclass(frozen=True)
class ModeFigures:
    """pace: with the setting's `devices`; shared_s: seconds a token on a verifier that steps without pause for many.

    devices_to_knee, devices_to_stretch: boards on one verifier until arithmetic sets a step's time, and until a step
    lasts `stretch` times as long; devices: the whole boards that stretch and memory allow (inf: no bound is known);
    usd_alone: for a million tokens at the price of a whole step for each step; usd_shared: with `devices` sharing it.
    """

    pace: Pace
    shared_s: float
    devices_to_knee: float
    devices_to_stretch: float
    devices: float
    usd_alone: float
    usd_shared: float


@dataclass(frozen=True)
class Plan:
    """gamma, tokens_a_round: the best number of guesses of a synchronous round, and its E[A]; waiting_estimates_s:
    (least, about); patience_s, at_patience: the suggested patience and what it gives; quicker, thriftier: whether that
    takes less time, fewer cloud steps than plain streaming; lookahead: the suggested lead of the board's chain;
    sibling_share: a second row in a pass pays for a guess that is likelier than this share of the first one's
    probability, for (p1 + p2) / (1 + share) > p1 just where p2 > share·p1; prefill_s: what the board needs to read the
    context, while the cloud streams.
    """

    step_s: float
    usd_per_step: float
    gamma: int
    tokens_a_round: float
    modes: dict[str, ModeFigures]
    waiting_estimates_s: tuple[float, float]
    catch_up_tokens: float
    balance_step_s: float
    balance_gamma: float
    waiting_break_even_rtt_s: float
    patience_s: float
    at_patience: ModeFigures
    quicker: bool
    thriftier: bool
    lookahead: int
    sibling_share: float
    prefill_s: float


def paces(setting: Setting, rtt_s: float, shared: bool) -> dict[str, Pace]:
    """The four modes at another round trip, the synchronous one with its best number of guesses there."""
    gamma = best_gamma(setting, rtt_s, shared)
    return {
        "cloud": formulas.cloud_alone(setting.step_s),
        "sync": synchronous(setting, rtt_s, gamma, shared),
        "async": chain(setting, rtt_s, inf, shared),
        "never_wait": chain(setting, rtt_s, 0.0, shared),
    }


def synchronous(setting: Setting, rtt_s: float, gamma: int, shared: bool) -> Pace:
    pass_s, step_s = setting.board.pass_s, setting.step_s
    return formulas.mean_pace(
        [formulas.synchronous(a, pass_s, rtt_s, step_s, gamma, shared) for a in setting.acceptances]
    )


def best_gamma(setting: Setting, rtt_s: float, shared: bool) -> int:
    return formulas.best_gamma(lambda gamma: synchronous(setting, rtt_s, gamma, shared).token_s)


def chain(setting: Setting, rtt_s: float, patience_s: float, shared: bool) -> Pace:
    pass_s, step_s = setting.board.pass_s, setting.step_s
    return formulas.mean_pace(
        [formulas.chain(a, pass_s, rtt_s, step_s, patience_s, shared) for a in setting.acceptances]
    )


def suggested_patience(setting: Setting) -> tuple[float, Pace]:
    """The patience that needs the fewest cloud steps among those at most `slack` slower than the quickest way, plain
    streaming included: 0, a grid up to the time that a new guess needs after a rejection and four passes more, and inf.
    """
    longest_s = setting.rtt_s + 4 * setting.board.pass_s
    grid = [longest_s * i / PATIENCE_STEPS for i in range(PATIENCE_STEPS + 1)] + [inf]
    tried = [(patience_s, chain(setting, setting.rtt_s, patience_s, setting.shared)) for patience_s in grid]
    quickest_s = min(setting.step_s, *(pace.token_s for _, pace in tried))
    allowed = [(p, pace) for p, pace in tried if pace.token_s <= quickest_s * (1 + setting.slack)]
    return min(allowed, key=lambda one: round(one[1].steps, 6), default=tried[0])


def figures(setting: Setting, pace: Pace, shared: Pace) -> ModeFigures:
    """What a mode means for a verifier that many boards share. shared: its pace there.

    A board takes part in `steps·t_v / token_s` of a verifier's steps, with `rows / steps` rows in each.
    """
    share = shared.steps * setting.step_s / shared.token_s
    rows_each = shared.rows / shared.steps
    to_knee = setting.verifier.sessions_to_knee(rows_each) / share
    to_stretch = setting.verifier.sessions_to_stretch(rows_each, setting.stretch) / share
    most = min(to_stretch, setting.verifier.max_sessions)
    devices = float(max(1, floor(most))) if isfinite(most) else inf
    usd_per_second = setting.usd_per_hour / 3600
    return ModeFigures(
        pace=pace,
        shared_s=shared.token_s,
        devices_to_knee=to_knee,
        devices_to_stretch=to_stretch,
        devices=devices,
        usd_alone=1e6 * pace.steps * setting.step_s * usd_per_second,
        usd_shared=1e6 * shared.token_s * usd_per_second / devices,
    )


def make_plan(setting: Setting) -> Plan:
    board, rtt_s, step_s, alpha = setting.board, setting.rtt_s, setting.step_s, setting.alpha
    gamma = best_gamma(setting, rtt_s, setting.shared)
    shared = paces(setting, rtt_s, shared=True)
    modes = {mode: figures(setting, pace, shared[mode]) for mode, pace in paces(setting, rtt_s, setting.shared).items()}
    patience_s, patient = suggested_patience(setting)
    return Plan(
        step_s=step_s,
        usd_per_step=setting.usd_per_hour / 3600 * step_s,
        gamma=gamma,
        tokens_a_round=fmean(a.tokens_a_round(gamma) for a in setting.acceptances),
        modes=modes,
        waiting_estimates_s=formulas.waiting_estimates(alpha, board.pass_s, rtt_s, step_s),
        catch_up_tokens=formulas.catch_up_tokens(board.pass_s, rtt_s, step_s),
        balance_step_s=formulas.balance_step_s(board.pass_s, rtt_s, gamma),
        balance_gamma=formulas.balance_gamma(board.pass_s, rtt_s, step_s),
        waiting_break_even_rtt_s=formulas.waiting_break_even_rtt_s(
            modes["async"].pace.token_s, fmean(1 / a.tokens_a_rejection for a in setting.acceptances), rtt_s, step_s
        ),
        patience_s=patience_s,
        at_patience=figures(setting, patient, chain(setting, rtt_s, patience_s, shared=True)),
        quicker=patient.token_s < WORTH_IT * step_s,
        thriftier=patient.steps < WORTH_IT,
        lookahead=formulas.lookahead(alpha, board.pass_s, rtt_s, step_s, CHAIN_FLOOR),
        sibling_share=board.row_share,
        prefill_s=board.prefill_s(setting.context),
    )
