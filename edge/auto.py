"""The policy that measures: which guesses are worth a pass, a row and a message, on this board, over this link."""

from __future__ import annotations

from math import ceil

from edge.calibration import HOPELESS, Calibration
from edge.guesses import revalue
from edge.pacing import departure
from edge.window import Window
from protocol.tree import Node

LEAST_GAIN = 0.012  # expected tokens below which a pass is not worth its energy
LEAST_LEAF = 0.01  # expected tokens below which a guess is not worth its bytes
MAIN_PATH = 8.0  # times its chance: a verdict takes whole runs of it, and an easy text shall be as fast as a chain
SIBLINGS_ROOM = 0.75  # of the guesses that are welcome: the rest is kept for going deeper
ROW_PRICE = 2.0  # a further row must earn this many times its share of the pass; found by replaying recorded drafts
UNREAD_ROOM = 0.9  # of them: what the model has not read it may correct
MUCH_LIKELIER = 2.0  # than a guess whose room it takes, times
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

    Guesses that were made without the model leave at once, and the model reads them where that is worth more than a
    pass further on: the chance that the text leaves them there is a token. What it thinks otherwise goes beside them.

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
        self._welcome = 0
        self._judged = 0
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
        if root is not self._root or most > self._welcome:
            self._restart(window, most)
        else:
            for node in filter(window.holds, self._picked):
                if node.note.row is None:
                    self._open.append(node)  # what leads to it was read first
                else:
                    self._branch(window, node, most)
        self._root, self._welcome = root, most
        for node in filter(window.holds, window.revised):
            self._branch(window, node, most)
        window.revised.clear()
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
        if window.advice is None:
            return window.num_rows
        step_s, trip_s = window.cadence.step_s, window.cadence.round_trip_s or 0.0
        steps = 1 + ceil((trip_s + window.cadence.cost.first_s) / step_s) if step_s else 2
        return min(window.num_rows, max(window.advice * steps, window.request.patience_s > 0))

    def _restart(self, window: Window, most: int) -> None:
        """The text has moved, or more guesses are welcome: there is what is left of them."""
        self._open = []
        for node in [window.tree.root, *window.tree]:
            if node.note.row is None:
                self._open.append(node)
            elif not node.children and node.note.candidates and window.holds(node):
                self._branch(window, node, most)

    def _branch(self, window: Window, node: Node, most: int) -> None:
        """Make guesses of a node's candidates; those that were made before are worth what is known now."""
        note = node.note
        if not note.candidates:
            return
        path, calibration, hardness = note.path, self.calibration, self._hardness
        depth = node.position - window.tree.root.position + 1
        best, *others = note.candidates
        share = max(0.0, 1 - (1 - calibration.first(best.probability, depth)) * hardness)
        if node.children:
            shares = {other.id: hardness * calibration.sibling(other.probability) for other in others}
            shares[best.id] = share
            for child in node.children.values():
                revalue(child, shares.get(child.id, 0.0), main=note.main and child.id == best.id)
        if not window.goes_on_behind(node):
            return
        note.depth, size = depth, len(window.tree)
        awaited = depth == 1 and window.request.patience_s > 0  # a verifier that waits must hear something
        wanted = best.id not in node.children and (awaited or path * share >= LEAST_GAIN)
        limit = UNREAD_ROOM * most if note.unread else most
        if wanted and (size < limit or self._make_room(window, path * share)):
            self._open.append(window.guess(node, best.id, share, main=note.main))
            size = len(window.tree)
        room = SIBLINGS_ROOM * most if window.branches else 0
        least = max(LEAST_LEAF, 0.5 / most) if most else 1.0
        for other in others:
            share = hardness * calibration.sibling(other.probability)
            if path * share < least or size >= room:
                break
            if other.id not in node.children:
                self._open.append(window.guess(node, other.id, share))
                size += 1

    def _make_room(self, window: Window, path: float) -> bool:
        """Drop the least likely unsent guess of a run that the model has not read, for one that is much likelier."""
        leaves = (node for node in window.unsent if not node.children and node.parent and node.parent.note.unread)
        leaf = min(leaves, key=_path, default=None)
        if leaf is None or leaf.note.path > path / MUCH_LIKELIER:
            return False
        window.drop(leaf)
        if leaf in self._open:
            self._open.remove(leaf)
        return True

    def _pick(self, window: Window, now: float) -> list[Node]:
        """The nodes for the next pass: open ones whose parents are evaluated already, or one that the model has not
        read yet, for its second thoughts.
        """
        price = window.cadence.cost.share * ROW_PRICE
        ahead = self._catching_up(window, now)
        root = window.tree.root.position
        worth = []
        for node in self._open:
            gain = _gain(node.note.path, node.position - root, node.note.main, ahead)
            if gain >= LEAST_GAIN:
                worth.append((gain, node))
        worth.sort(key=_first, reverse=True)
        picked: list[Node] = []
        total = 0.0
        for gain, node in worth[:MOST_ROWS]:
            if picked and gain * (1 + price * (len(picked) - 1)) <= price * total:
                break
            picked.append(node)
            total += gain
        unread = self._unread(window, ahead, total / window.cadence.cost.times(len(picked)) if picked else 0.0)
        if unread is not None:
            return [unread]
        for node in picked:
            self._open.remove(node)
        return picked

    def _unread(self, window: Window, ahead: tuple[float, float], rate: float) -> Node | None:
        """The node of the main path that the model should read next, with all before it, if a pass of that is worth at
        least `rate`. It is worth a token where the text leaves the guesses that were made without the model.
        """
        at: Node | None = window.tree.root
        root, tip, total, rows = window.tree.root.position, None, 0.0, 0
        while at is not None and rows < MOST_ROWS:
            note, children = at.note, at.children.values()
            if note.unread:
                leaves = note.path - sum(child.note.path for child in children)
                total += _gain(leaves, at.position - root, True, ahead)
                rows += 1
                times = window.cadence.cost.times(rows)
                if total >= LEAST_GAIN and total >= rate * times:
                    rate, tip = total / times, at
            at = max(children, key=_path, default=None)
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


def _gain(chance: float, depth: int, main: bool, ahead: tuple[float, float]) -> float:
    """What a pass brings that makes guesses behind a node of this chance and depth. ahead: see `_catching_up`."""
    first, slowness = ahead
    gain = chance if depth >= first else chance / (1 + (first - depth) * slowness)
    return gain * MAIN_PATH if main else gain


def _first(one: tuple[float, Node]) -> float:
    return one[0]


def _path(node: Node) -> float:
    return node.note.path
