"""What a verifier learns from its steps: what they cost, what guesses are worth, how long the due ones wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from cloud.cost import StepCost
from cloud.engines.base import Outcome
from cloud.ledger import Ledger
from cloud.scheduler import Step
from cloud.tenants import Tenants
from protocol.messages import MAX_COUNT

QUEUE_GAIN = 0.1
PRICE_GAIN = 0.15
CHOICE = 0.7  # of the price: guesses a little less likely are welcome too, so that there is a choice in every step
NOTHING_PAYS = 0.95
CROWDED, CALM = 1.5, 1.25  # times a step of one session: beyond the one it is a crowd, below the other no longer
STEPS = 15  # whose median is the time of a step


class Experience:
    """crowded: whether plain rows are in each other's way; queue_s: for which sessions have waited of late."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or StepCost()
        self.crowded = False
        self.queue_s = 0.0
        self._price = 0.0
        self._step_s: deque[float] = deque(maxlen=STEPS)

    @property
    def step_us(self) -> int:
        """Median time of the latest steps that drew a token, in microseconds, as far as it can be told to a device; 0
        before the first.
        """
        return min(MAX_COUNT, round(median(self._step_s) * 1e6)) if self._step_s else 0

    @property
    def welcome(self) -> float:
        """The chance that a guess must have to be welcome."""
        return self._price * CHOICE if self._price < NOTHING_PAYS else 1.0

    def queued(self, drawn: Sequence[Ledger], waiting: Sequence[Ledger], planned_at: float) -> float:
        """Mean time in s for which the sessions in a step had been due before, their first not counted, and for which
        those have waited that find no room in the KV cache.
        """
        waits = [max(0.0, planned_at - ledger.due_since(self.crowded)) for ledger in drawn if ledger.steps]
        waits += [planned_at - ledger.waiting_since for ledger in waiting]
        if not waits:
            return 0.0
        mean_s = fmean(waits)
        self.queue_s += QUEUE_GAIN * (mean_s - self.queue_s)
        return mean_s

    def priced(self, step: Step) -> None:
        """A step is planned: what a row in it must be worth."""
        if step.roots:
            self._price += PRICE_GAIN * (step.price - self._price)

    def timed(self, outcome: Outcome) -> None:
        """A step is over."""
        if outcome.accepted:
            self._step_s.append(outcome.seconds)

    def learn(self, step: Step, outcome: Outcome, ledgers: Mapping[int, Ledger], tenants: Tenants) -> None:
        """What a step took and gave, for the next ones."""
        cost = self.cost
        if outcome.failed or outcome.rows != step.roots + step.drafts + step.prefill:
            return  # the engine did something else than was planned
        cost.learn(step.roots + step.drafts, outcome.seconds, step.context, step.prefill)
        if not step.roots:
            return
        plain_s = cost.seconds(step.roots, step.context, step.prefill)
        _guard(step, outcome, plain_s, ledgers, tenants)
        alone_s = cost.seconds(1)
        all_s = cost.seconds(step.due, step.context, step.prefill)
        self.crowded = all_s > (CALM if self.crowded else CROWDED) * alone_s


def _guard(step: Step, outcome: Outcome, plain_s: float, ledgers: Mapping[int, Ledger], tenants: Tenants) -> None:
    """What each tenant's guesses added to the step's tokens, and their part, by rows, of the time they added.

    In a step that was shared out they are there for their tenant: then its own tokens count, not everybody's.
    """
    added: dict[str, list[int]] = {}
    roots: dict[str, int] = {}
    for work in step.work:
        ledger = ledgers.get(work.key)
        if ledger is None or work.key not in outcome.accepted:
            continue
        roots[ledger.tenant] = roots.get(ledger.tenant, 0) + 1
        if work.draft:
            of = added.setdefault(ledger.tenant, [0, 0])
            of[0] += len(outcome.accepted[work.key]) - 1
            of[1] += len(work.draft)
    more_s = outcome.seconds - plain_s
    for name, (tokens, rows) in added.items():
        seconds = plain_s + more_s * rows / step.drafts
        plain = roots[name] if step.shared else step.roots
        tenants[name].goodput.learn(plain + tokens, seconds, plain, plain_s)
    for tenant in tenants:
        if tenant.num_sessions:
            tenant.goodput.step()
