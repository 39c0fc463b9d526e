"""Time, cloud steps and rows a token of each mode. All times in seconds.

t_d: a drafter's pass of one row; R: the link's round trip; t_v: a cloud step; alpha: acceptance; gamma: guesses a
round. No jitter, no loss, messages without length; start and end of the text are not counted.

shared: the verifier steps without pause for others too, so that what arrives waits for the end of a step that is under
way. A session's own steps end on that beat, so its next one starts a whole number of t_v after the last one's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from statistics import fmean

from tools.plan.acceptance import Acceptance

PHASES = 8
NEGLIGIBLE = 1e-7
MAX_GAMMA = 64


@dataclass(frozen=True)
class Pace:
    """What a token takes: token_s of time, steps of the verifier, rows in them (root rows counted)."""

    token_s: float
    steps: float
    rows: float


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Texts of equal length, one after the other."""
    return Pace(fmean(p.token_s for p in paces), fmean(p.steps for p in paces), fmean(p.rows for p in paces))


def cloud_alone(step_s: float) -> Pace:
    """Plain streaming: t_v a token. The link's R delays the first token only."""
    return Pace(step_s, 1.0, 1.0)


def synchronous(
    acceptance: Acceptance, pass_s: float, rtt_s: float, step_s: float, gamma: int, shared: bool = False
) -> Pace:
    """(gamma·t_d + R + t_v) / E[A]: draft, send, verify, answer, one after the other. Leviathan et al., arXiv
    2211.17192, theorem 3.8, in seconds and with the link's round trip added.
    """
    tokens = acceptance.tokens_a_round(gamma)
    arrived_s = gamma * pass_s + rtt_s
    start_s = _on_beat(arrived_s, step_s) if shared else arrived_s
    return Pace((start_s + step_s) / tokens, 1 / tokens, (gamma + 1) / tokens)


def best_gamma(time_of: Callable[[int], float]) -> int:
    """The number of guesses a round, 1 to 64, for which `time_of` is least."""
    return min(range(1, MAX_GAMMA + 1), key=time_of)


def chain(
    acceptance: Acceptance,
    pass_s: float,
    rtt_s: float,
    step_s: float,
    patience_s: float = inf,
    shared: bool = False,
) -> Pace:
    """The asynchronous chain: a board that drafts without pause and sends each guess as it is made, and a verifier that
    waits at most `patience_s` for drafts before it takes a plain step. inf: it waits for ever; 0: it never waits.

    Own derivation, a renewal process. At time 0 a cloud step ends with a token t that the board's chain does not have;
    all guesses beyond it are lost. The board hears of it at R/2, ends the pass it is in (rho more), and its guess k for
    the k-th token behind t reaches the verifier at R + rho + k·t_d. Let f tokens behind t be committed when a step can
    start. The first useful guess is f + 1; the step starts when that is there or the patience is over, checks the n
    guesses that have come, and commits max(f, min(n, N)) + 1 tokens, N being the number of guesses that are right. Once
    that is N + 1, the board's chain is wrong again: the process starts anew. For a given N all of this is determined,
    so time, steps and rows up to there are sums over the steps, each weighted with the probability P(N > what the steps
    before it have covered) that it happens at all. By the renewal-reward theorem (Ross, Introduction to Probability
    Models, section 7.4) a token takes their sum over the tokens between two rejections.

    Assumes: restarts are alike and independent of each other; rho is uniform in [0, t_d] (jitter makes it so), here a
    mean over 8 phases; the chain is never too long to go on; a guess leaves at once.
    """
    seconds = steps = rows = 0.0
    for phase in range(PHASES):
        first_s = rtt_s + (phase + 0.5) / PHASES * pass_s  # a guess k is with the verifier `k * pass_s` after this
        committed, free_at = 0, 0.0
        while (happens := acceptance.survival(committed)) > NEGLIGIBLE:
            useful_at = first_s + (committed + 1) * pass_s
            start = max(free_at, min(free_at + patience_s, useful_at))
            if shared:
                start = _on_beat(start, step_s)
            arrived = max(0, int((start - first_s) / pass_s + 1e-9))
            seconds += happens * (start + step_s - free_at)
            steps += happens
            rows += happens * (1 + max(0, arrived - committed))
            committed = max(committed, arrived) + 1
            free_at = start + step_s
    tokens = PHASES * acceptance.tokens_a_rejection
    return Pace(seconds / tokens, steps / tokens, rows / tokens)


def waiting_estimates(alpha: float, pass_s: float, rtt_s: float, step_s: float) -> tuple[float, float]:
    """(least, about) seconds a token of the chain that waits, in short: alpha·t_d + (1 - alpha)(R + t_v) if no rejected
    guess is waited for, t_d + (1 - alpha)(R + t_v) if each is. What `chain` adds is the rest of a step that is under
    way when a guess arrives, and the rest of a pass that is under way when a rejection does.
    """
    wait_s = (1 - alpha) * (rtt_s + step_s)
    return alpha * pass_s + wait_s, pass_s + wait_s


def catch_up_tokens(pass_s: float, rtt_s: float, step_s: float) -> float:
    """R / (t_v - t_d): plain tokens that a verifier which goes on alone writes after a rejection before the new guesses
    have overtaken it (guess k comes at R + k·t_d, plain token k at k·t_v). inf where the board drafts no faster
    than the cloud decodes: no guess is ever in time.
    """
    return rtt_s / (step_s - pass_s) if step_s > pass_s else inf


def balance_step_s(pass_s: float, rtt_s: float, gamma: float) -> float:
    """gamma·t_d + R: a cloud step this long lasts until the next gamma guesses are drafted and delivered, so
    that neither side idles. PEARL (Liu et al., arXiv 2408.11850) takes gamma = t_v / t_d for R = 0.
    """
    return gamma * pass_s + rtt_s


def balance_gamma(pass_s: float, rtt_s: float, step_s: float) -> float:
    """(t_v - R) / t_d, the gamma of the balance. Below 0: a verdict's way is longer than the step, and a verifier that
    waits idles whatever the length of the draft.
    """
    return (step_s - rtt_s) / pass_s


def lookahead(alpha: float, pass_s: float, rtt_s: float, step_s: float, floor: float) -> int:
    """Guesses that a chain should lead the committed text by: as many as are drafted until the verdict on the first
    is back, ceil((R + t_v) / t_d), but none that is right with a probability alpha^k below `floor`.
    """
    until_verdict = ceil((rtt_s + step_s) / pass_s - 1e-9)
    likely = int(log(floor) / log(alpha)) if alpha > 0 else 1
    return max(1, min(until_verdict, likely))


def waiting_break_even_rtt_s(waiting_s: float, rejections_a_token: float, rtt_s: float, step_s: float) -> float:
    """The R beyond which the chain that waits, `waiting_s` a token at `rtt_s`, is slower than plain streaming: each
    rejection waits R once, so its time a token grows by `rejections_a_token`·R. Below 0: it never is quicker.
    """
    return rtt_s + (step_s - waiting_s) / rejections_a_token


def _on_beat(time_s: float, step_s: float) -> float:
    return ceil(time_s / step_s - 1e-9) * step_s
