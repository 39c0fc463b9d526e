"""What a step costs on this engine, by what is in it: measured at the start, and by every step since."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Upper ends of the groups of row counts that are priced together: at most twice the one below, half as many more later.
EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536)
TRUSTED = 1.5  # visits: of one alone nobody knows whether it was a hiccup
SETTLED = 8.0  # visits: from here on a change is the machine's mood, which all groups share
MOST_SEEN, FADE = 20.0, 0.998  # what was last seen a few hundred steps ago may be looked at again
GAIN, MOOD = 0.1, 0.05
TINY = 1e-9
USUAL_CONTEXT, USUAL_PREFILL = 30_000.0, 4.0  # tokens, rows: see `Slope`
ODD = 2.0  # a measurement counts as no further off than this factor


@dataclass(slots=True)
class Group:
    """Steps of about as many rows. seen: visits, fading; rows, context, prefill, seconds: their means."""

    known: bool = False
    seen: float = 0.0
    rows: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    seconds: float = 0.0


class Slope:
    """Seconds per unit of something in which steps of as many rows differ: a regression within the groups.

    usual: a difference below which a step's noise says little; it draws the slope to 0 (a ridge).
    """

    def __init__(self, usual: float) -> None:
        self.per_unit = 0.0
        self._usual = usual
        self._spread = self._sum = 0.0

    def learn(self, off: float, excess_s: float) -> None:
        """A step that was `off` units from its group's mean took so much longer than expected."""
        self._spread = FADE * self._spread + off * off
        self._sum = FADE * self._sum + off * (excess_s + self.per_unit * off)
        self.per_unit = max(0.0, self._sum / (self._spread + self._usual**2))


class StepCost:
    """Seconds of a step: `curve(rows) + a · context + b · prefill rows`.

    rows: those that a token is drawn behind, roots and drafts; context: the lengths of their sessions' texts, summed.
    The curve runs through the means of the row counts that were seen and never falls, which takes in a floor with a
    knee (weights are read once for all rows), a staircase (row tiles) and a straight line alike.

    Beyond the rows that were seen, on both sides, the time is taken to be in proportion to them: so nobody thinks that
    rows are free who has not tried. Only up to `frontier`, one group further than what was seen of late, it is taken to
    grow no faster than before, so that somebody goes and looks, at the price of a step or two with more than pay.
    """

    def __init__(self) -> None:
        self.most_prefill = 0
        self.frontier = EDGES[0]
        self._groups = [Group() for _ in EDGES]
        self._context, self._prefill = Slope(USUAL_CONTEXT), Slope(USUAL_PREFILL)
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def seconds(self, rows: int, context: int = 0, prefill: int = 0) -> float:
        """What a step of `rows` that draw tokens, `context` and `prefill` rows is expected to take; 0: no idea yet."""
        return self._curve(rows) + self.per_context * context + self.per_prefill_row * prefill

    @property
    def fewest(self) -> int:
        """The fewest rows of which the time is known; 0 before the first step."""
        return round(self._rows[0]) if self._rows else 0

    @property
    def per_context(self) -> float:
        return self._context.per_unit

    @property
    def per_prefill_row(self) -> float:
        return self._prefill.per_unit

    def learn(self, rows: int, seconds: float, context: int = 0, prefill: int = 0) -> None:
        """A step has taken so long."""
        self.most_prefill = max(self.most_prefill, prefill)
        if seconds <= 0 or rows <= 0:
            return  # of prefill alone nobody can tell what of its time was fixed
        group = self._groups[min(bisect_left(EDGES, rows), len(EDGES) - 1)]
        beside = self.per_context * context + self.per_prefill_row * prefill
        if group.seen >= TRUSTED:
            expected = self._curve(rows) + beside
            unknown = max(0.0, prefill - group.prefill) * self._curve(rows) / rows  # at most as dear as other rows
            seconds = min(max(seconds, expected / ODD), (expected + unknown) * ODD)
            self._prefill.learn(prefill - group.prefill, seconds - expected)
            if group.seen >= SETTLED and self._rows[0] <= rows <= self._rows[-1]:
                self._context.learn(context - group.context, seconds - expected)
                mood = (seconds / expected) ** MOOD
                for other in self._groups:
                    other.seconds *= mood
        elif group.seen:
            seconds = min(seconds, group.seconds)  # hiccups only ever take longer
        for other in self._groups:
            other.seen *= FADE
        group.seen = min(group.seen + 1, MOST_SEEN)
        gain = max(1 / group.seen, GAIN) if group.known else 1.0
        if self._rows and self._rows[0] < rows and seconds - beside <= self._seconds[-1]:
            group.seen = max(group.seen, 2.0)  # no slower than fewer rows: that was no hiccup
        group.known = group.known or group.seen >= TRUSTED
        group.rows += gain * (rows - group.rows)
        group.context += gain * (context - group.context)
        group.prefill += gain * (prefill - group.prefill)
        group.seconds += gain * (seconds - group.seconds)
        self._draw()

    def _curve(self, rows: int) -> float:
        xs, ys = self._rows, self._seconds
        if not xs or rows <= 0:
            return 0.0
        at = bisect_left(xs, rows)
        if at == 0:
            return ys[0] * rows / xs[0]
        if at < len(xs):
            share = (rows - xs[at - 1]) / (xs[at] - xs[at - 1])
            return ys[at - 1] + share * (ys[at] - ys[at - 1])
        in_proportion = ys[-1] * rows / xs[-1]
        if rows > self.frontier:
            return in_proportion
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        return min(ys[-1] + slope * (rows - xs[-1]), in_proportion)

    def _draw(self) -> None:
        """The curve through the groups: means of neighbours where one of more rows was quicker."""
        trusted = [i for i, group in enumerate(self._groups) if group.seen >= TRUSTED]
        reached = (trusted or [i for i, group in enumerate(self._groups) if group.seen])[-1] + 1
        blocks: list[tuple[float, float, float, float]] = []  # weight, fewest rows, most rows, seconds
        for group in self._groups[:reached]:
            if not (group.known if trusted else group.seen):  # one visit has to do while there is nothing better
                continue
            beside = self.per_context * group.context + self.per_prefill_row * group.prefill
            seconds = max(TINY, group.seconds - beside)
            blocks.append((max(group.seen, TRUSTED), group.rows, group.rows, seconds))
            while len(blocks) > 1 and blocks[-2][3] >= blocks[-1][3]:
                (a, fewest, _, first), (b, _, most, second) = blocks[-2:]
                blocks[-2:] = [(a + b, fewest, most, (a * first + b * second) / (a + b))]
        self._rows, self._seconds = [], []
        for _, fewest, most, seconds in blocks:
            ends = (fewest, most) if most > fewest else (fewest,)
            self._rows += ends
            self._seconds += [seconds] * len(ends)
        self.frontier = EDGES[min(reached, len(EDGES) - 1)]
