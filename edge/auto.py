"""The policy that measures: which guesses are worth a pass, a row and a message, on this board, over this link."""

from __future__ import annotations

from math import ceil

from edge.calibration import HOPELESS, Calibration
from edge.pacing import departure
from edge.window import Window
from protocol.tree import Node

LEAST_GAIN = 0.012  # expected tokens below which a pass is not worth its energy
LEAST_LEAF = 0.01  # expected tokens below which a guess is not worth its bytes
MAIN_PATH = 8.0  # times its chance: a verdict takes whole runs of it, and an easy text shall be as fast as a chain
SIBLINGS_ROOM = 0.75  # of the guesses that are welcome: the rest is kept for going deeper
ROW_PRICE = 2.0  # a further row must earn this many times its share of the pass; found by replaying recorded drafts
MOST_ROWS = 8  # of one pass
TEXT_WEIGHT = 3.0  # misses that a text must show before it is half believed to be easier or harder than others
MOST_HARDNESS = 3.0
PROBE = 6  # positions of a text that are guessed before a drafter that was hopeless lately is given up


class AutoPolicy:
    """Best first over a tree of guesses.

    The likeliest open nodes are evaluated together, as many as raise the pass's expected tokens a second: the k-th is
    taken while `P_k (1 + r (k-1)) > r (P_1 + … + P_{k-1})`, where P is a node's calibrated probability of being on
    the target's path and r the measured price of a row. Every candidate of an evaluated node that is likely enough
    becomes a guess; a guess costs the board nothing until it is evaluated itself.

    What a node leads to must still be ahead of the verifier when it gets there. A verifier that steps without pause
    moves a token a step at least, so a node that is n tokens too near counts for what it brings a pass of those that
    are needed to overtake it; a board that is slower than that never drafts.

    Texts differ more than boards do, so what the calibration says of misses is scaled by this text's own: `hardness`
    is how many there were over how many were expected.
    """

    candidates = 6

    def __init__(self, calibration: Calibration, *, paced: bool = True) -> None:
        self.calibration, self.paced = calibration, paced
        self._root: Node | None = None
        self._open: list[Node] = []
        self._picked: list[Node] = []
        self._judged = 0
        self._most_before = 0
        self._misses = self._expected_misses = 0.0
        self._hardness = 1.0

    def grow(self, window: Window, now: float) -> list[Node]:
        if window.outcomes:
            self._learn(window)
        if window.request.patience_s and self._hopeless():
            window.give_up_drafting(now)  # the verifier waits in vain
        root = window.tree.root
        if root.note.candidates is None or window.alone:
            return []
        most = self._most(window)
        if root is not self._root or most > self._most_before:
            self._root = root
            self._restart(window, most)
        else:
            for node in self._picked:
                if node.note.row is not None:
                    self._branch(window, node, most)
                elif window.holds(node):
                    self._open.append(node)
        for node in window.revised:
            if window.holds(node):
                self._branch(window, node, most)
        window.revised.clear()
        self._most_before = most
        self._picked = self._pick(window, now)
        return self._picked

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        return departure(window, now, pass_s, paced=self.paced)

    # -- details --------------------------------------------------------------------------------------------------

    def _learn(self, window: Window) -> None:
        for candidates, depth, id in window.outcomes:
            best = candidates[0]
            right = best.id == id
            self._expected_misses += 1 - self.calibration.first(best.probability, depth)
            self._misses += not right
            self.calibration.saw(candidates, depth, id)
            self._judged += 1
        window.outcomes.clear()
        hardness = (self._misses + TEXT_WEIGHT) / (self._expected_misses + TEXT_WEIGHT)
        self._hardness = min(MOST_HARDNESS, hardness)

    def _hopeless(self) -> bool:
        """Whether this text's guesses fail as those of the texts before did."""
        right = self._judged - self._misses
        return self._judged >= PROBE and right < HOPELESS * self._judged and self.calibration.hopeless()

    def _most(self, window: Window) -> int:
        """How many guesses are welcome at once: what the verifier takes in the steps that begin until its verdict on
        what leaves now is here.
        """
        if window.advice is None or window.cadence.round_trip_s is None:
            return window.num_rows
        step_s, trip_s = window.cadence.step_s, window.cadence.round_trip_s
        steps = 1 + ceil((trip_s + window.cadence.cost.first_s) / step_s) if step_s else 2
        return min(window.num_rows, max(window.advice * steps, window.request.patience_s > 0))

    def _restart(self, window: Window, most: int) -> None:
        """The text has moved: its guesses are what is left of them."""
        self._open = []
        for node in [window.tree.root, *window.tree]:
            if node.note.row is None:
                self._open.append(node)
            elif not node.children and node.note.candidates:
                self._branch(window, node, most)

    def _branch(self, window: Window, node: Node, most: int) -> None:
        """Make guesses of a node's candidates."""
        note = node.note
        if not note.candidates or not window.can_guess(node):
            return
        if node.children:
            self._revalue(window, node)
        path, size, calibration, hardness = note.path, len(window.tree), self.calibration, self._hardness
        note.depth = depth = node.position - window.tree.root.position + 1
        best = note.candidates[0]
        share = max(0.0, 1 - (1 - calibration.first(best.probability, depth)) * hardness)
        awaited = depth == 1 and window.request.patience_s > 0  # a verifier that waits must hear something
        if best.id in node.children:
            pass
        elif (awaited or path * share >= LEAST_GAIN) and size < most:
            self._open.append(window.guess(node, best.id, share, main=note.main))
            size += 1
        room = SIBLINGS_ROOM * most if window.branches else 0
        least = max(LEAST_LEAF, 0.5 / most) if most else 1.0
        for other in note.candidates[1:]:
            if other.id in node.children:
                continue
            share = hardness * calibration.sibling(other.probability)
            if path * share < least or size >= room:
                break
            self._open.append(window.guess(node, other.id, share))
            size += 1

    def _revalue(self, window: Window, node: Node) -> None:
        note = node.note
        depth = node.position - window.tree.root.position + 1
        best = note.candidates[0]
        values = {other.id: self._hardness * self.calibration.sibling(other.probability) for other in note.candidates}
        values[best.id] = max(0.0, 1 - (1 - self.calibration.first(best.probability, depth)) * self._hardness)
        for child in node.children.values():
            window.revalue(child, values.get(child.id, 0.0), main=note.main and child.id == best.id)

    def _pick(self, window: Window, now: float) -> list[Node]:
        """The open nodes for the next pass, parents are evaluated already."""
        price = window.cadence.cost.share * ROW_PRICE
        first, slowness = self._catching_up(window, now)
        root = window.tree.root.position
        worth = []
        for node in self._open:
            behind = first - (node.position - root)
            gain = node.note.path if behind <= 0 else node.note.path / (1 + behind * slowness)
            if node.note.main:
                gain *= MAIN_PATH
            if gain >= LEAST_GAIN:
                worth.append((gain, node))
        worth.sort(key=_gain, reverse=True)
        picked: list[Node] = []
        total = 0.0
        for gain, node in worth[:MOST_ROWS]:
            if picked and gain * (1 + price * (len(picked) - 1)) <= price * total:
                break
            picked.append(node)
            total += gain
        tip = self._second(window, price, total / (1 + window.cadence.cost.share * (len(picked) - 1)) if picked else 0.0, first, slowness)
        if tip is not None:
            return [tip]
        for node in picked:
            self._open.remove(node)
        return picked

    def _second(self, window, price, rate, first, slowness):
        at = window.tree.root
        root = at.position
        tip, total, rows = None, 0.0, 0
        best = rate
        while at is not None and rows < MOST_ROWS:
            note = at.note
            if not note.candidates:
                break
            following = max(at.children.values(), key=lambda c: c.note.path, default=None)
            if note.unread:
                behind = first - (at.position - root)
                gain = note.path - sum(c.note.path for c in at.children.values())
                if behind > 0:
                    gain /= 1 + behind * slowness
                gain *= MAIN_PATH
                rows += 1
                total += gain
                if total >= LEAST_GAIN and total / (1 + window.cadence.cost.share * (rows - 1)) >= best:
                    best = total / (1 + window.cadence.cost.share * (rows - 1))
                    tip = at
            at = following
        return tip

    def _catching_up(self, window: Window, now: float) -> tuple[float, float]:
        """(depth, passes a token): guesses behind a node of this depth are still ahead of the verifier when they get
        there, even if it takes one token a step; to get one token further ahead of it takes so many passes.
        """
        cadence = window.cadence
        pass_s, step_s, trip_s = cadence.cost.first_s, cadence.step_s, cadence.round_trip_s
        if window.request.patience_s or not step_s or trip_s is None:
            return 0.0, 1.0
        steps = ceil((now + pass_s + trip_s - cadence.beat_at) / step_s)
        return steps, 1 / max(1 - pass_s / step_s, 0.05)


def _gain(one: tuple[float, Node]) -> float:
    return one[0]
