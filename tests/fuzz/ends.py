"""A board's window and real verifiers over a channel that loses, doubles and reorders, until it is good again.

Time passes only where a test says so. Everything that was said stays in the air until it is delivered or lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from cloud.engines.base import Outcome, Plan, TargetInfo
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.session import Request, Timing
from edge.window import Window
from protocol import topics
from protocol.messages import AnyMessage, ErrorCode, Open, VerifierState, decode, encode
from protocol.sampling import Sampling
from tests.fuzz.choices import Choices

DEVICE, TARGET, SESSION = "a.b", "t", 5
PROMPT = (1, 0, 2)
VOCAB, STOP = 5, 4
MAX_EVENTS = 60
GOOD_LINK_S = 90.0  # until when the text must be there: an idle session is forgotten, an open repeated, a back-off over
STEP_S, ONE_WAY_S = 1 / 16, 1 / 32


def next_id(text: Sequence[int]) -> int:
    """The target: what follows a text. Not a function of the last token alone, so that a splice would show."""
    return (sum(text[-3:]) * 7 + len(text)) % (VOCAB - 1)


def whole_text(max_tokens: int) -> list[int]:
    text = list(PROMPT)
    while len(text) < len(PROMPT) + max_tokens:
        text.append(next_id(text))
    return text


class TinyEngine:
    """An engine that adds numbers; a step takes no time of its own."""

    takes_trees = True
    num_blocks = free_blocks = 1 << 20
    retained_blocks = 0
    info = TargetInfo(TARGET, "tiny", "0" * 64, "1" * 64, VOCAB, 64, "exact")

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}
        self.losing, self.seconds = False, STEP_S

    def blocks(self, key: int, length: int = 0) -> int:
        return 1

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        self._texts[key], self._read[key] = list(ids), 0

    def pending(self, key: int) -> int:
        return len(self._texts[key]) - self._read[key]

    def step(self, plan: Plan) -> Outcome:
        outcome = Outcome(seconds=self.seconds)
        for work in plan.work:
            text = self._texts[work.key]
            outcome.ran[work.key] = work.rows + len(work.draft)
            self._read[work.key] += work.rows
            if self.pending(work.key):
                continue
            accepted, at = [], -1
            while at is not None:
                id = next_id(text)
                text.append(id)
                accepted.append(id)
                rows = zip(work.draft, work.parents, strict=True)
                at = next((i for i, (guess, parent) in enumerate(rows) if (guess, parent) == (id, at)), None)
            self._read[work.key] = len(text) - 1
            outcome.accepted[work.key] = accepted
        if self.losing:
            self.losing = False
            outcome.evicted = list(self._texts)
            self._read = dict.fromkeys(self._read, 0)
        return outcome

    def evict(self, key: int) -> None:
        self._read[key] = 0

    def close(self, key: int) -> None:
        del self._texts[key], self._read[key]


class Flying(NamedTuple):
    """A message on its way. to: a verifier's name, or "" for the board."""

    to: str
    topic: str
    payload: bytes


class Ends:
    """One session from its open to its end. air: what is on its way, oldest first."""

    def __init__(self, *, max_tokens: int = 8, patience_s: float = 0.0, have: int = 0, ahead: int = 4) -> None:
        self.now = 0.0
        self.truth = whole_text(max_tokens)
        self._bounds = Bounds(draft_rows=6, ahead=ahead, sessions=1000, sessions_per_device=1000)
        self._request = Request(SESSION, TARGET, PROMPT, Sampling(), max_tokens, (STOP,), patience_s)
        self._begin(have)
        self.verifiers: dict[str, Verifier] = {}
        self.air: list[Flying] = []
        self._born = self._turn = 0
        for _ in range(2):
            self.start_verifier()

    # -- the channel --------------------------------------------------------------------------------------------------

    def deliver(self, place: int, *, keep: bool = False) -> None:
        """One of the messages in the air arrives; keep: and will again."""
        if not self.air:
            return
        place %= len(self.air)
        flying = self.air[place] if keep else self.air.pop(place)
        if not flying.to:
            self.window.receive(decode(flying.payload), self.now)
        elif flying.to in self.verifiers:
            self.verifiers[flying.to].receive(flying.topic, flying.payload, self.now)
        self.check()

    def lose(self, place: int) -> None:
        if self.air:
            self.air.pop(place % len(self.air))

    def link(self, up: bool) -> None:
        self.window.link_up(self.now) if up else self.window.link_down("cut")
        self.check()

    # -- the verifiers ------------------------------------------------------------------------------------------------

    def start_verifier(self) -> None:
        self._born += 1
        name = f"v{self._born}"
        self.verifiers[name] = Verifier(name, TinyEngine(), scheduler=Scheduler(16, 4), bounds=self._bounds)

    def kill_verifier(self, place: int, *, told: bool = True) -> None:
        """One dies and another is started in its place; told: the broker says so."""
        name = list(self.verifiers)[place % len(self.verifiers)]
        del self.verifiers[name]
        self.start_verifier()
        if told:
            self._fly("", topics.verifier_state_topic(name), VerifierState(name, "gone"))

    def drain(self, place: int) -> None:
        name = list(self.verifiers)[place % len(self.verifiers)]
        self.verifiers[name].drain()
        self.check()
        del self.verifiers[name]
        self.start_verifier()

    def step(self, place: int, *, losing: bool = False, seconds: float = STEP_S) -> None:
        """A verifier does what is due; losing: its KV cache is lost with it; seconds: that the engine says it took."""
        verifier = list(self.verifiers.values())[place % len(self.verifiers)]
        verifier.tick(self.now)
        plan = verifier.plan(self.now)
        if plan.work:
            verifier.engine.losing, verifier.engine.seconds = losing, seconds
            verifier.settle(verifier.engine.step(plan), self.now)
        self.check()

    # -- the board ----------------------------------------------------------------------------------------------------

    def another(self) -> None:
        """The application wants no more of this text, and asks for another one at once."""
        self.window.cancel()
        self.check()
        # Handles come from the low bits of a session's id: this one's will be the same, where it can be.
        self._request = replace(self._request, session=self._request.session + 128)
        self._begin(0)
        self.wait(0.0)

    def draft(self, right: Sequence[bool]) -> None:
        """A chain behind the first branch of the tree, right or wrong at each place, and off it goes."""
        window = self.window
        tip, text = window.tree.root, list(window.text)
        while tip.children:
            tip = next(iter(tip.children.values()))
            text.append(tip.id)
        for good in right:
            if not window.can_guess(tip):
                break
            text.append((next_id(text) + (not good)) % (VOCAB - 1))
            tip = window.guess(tip, text[-1], 0.8)
        window.flush(self.now)
        self.check()

    def sibling(self, id: int) -> None:
        """A second guess for the next position."""
        window = self.window
        if window.branches and window.can_guess(window.tree.root):
            window.guess(window.tree.root, id, 0.2)
            window.flush(self.now)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.window.tick(self.now)
        for verifier in self.verifiers.values():
            verifier.tick(self.now)
        self.check()

    # -- what is true -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever has happened, the board's text is the beginning of the target's, and does not shrink."""
        window = self.window
        window.moves.clear()
        window.outcomes.clear()
        assert window.text == self.truth[: window.frontier] and window.frontier >= self._known
        # It may give up after many opens that came to nothing, as a story can make them; nothing else may end it.
        end = window.failure
        assert end is None or not end.code or end.code in ErrorCode.REOPEN, end
        assert not window.finish or window.text == self.truth
        self._known = window.frontier
        for send in window.take():
            if window._link_up:
                self._route(send.topic, send.message)
        for verifier in self.verifiers.values():
            for send in verifier.take():
                self._fly("", send.topic, send.message)

    def settle(self, wrong_every: int = 3) -> None:
        """The channel is good from now on: the whole text comes."""
        if not self.window._link_up:
            self.link(True)
        until, drafts = self.now + GOOD_LINK_S, 0
        while self.now < until and not (self.window.done and not self.air):
            if self.air:
                self.now += ONE_WAY_S
                for _ in range(len(self.air)):
                    self.deliver(0)
            for place in range(len(self.verifiers)):
                self.step(place)
            if self.window.may_send:
                drafts += not len(self.window.tree)
                self.draft([] if len(self.window.tree) else [drafts % wrong_every != 0, True])
            if not self.air:
                times = [verifier.wake_at(self.now) for verifier in self.verifiers.values()]
                wake_at = min(self.window.wake_at(), *times)
                self.wait(max(1 / 64, wake_at - self.now) if wake_at < inf else 1.0)
        assert self.window.done, f"the text has stopped at {self.window.frontier} of {len(self.truth)} tokens"

    # -- details ------------------------------------------------------------------------------------------------------

    def _begin(self, have: int) -> None:
        committed = self.truth[len(PROMPT) : len(PROMPT) + min(have, self._request.max_tokens - 1)]
        self.window = Window(DEVICE, self._request, timing=Timing(), now=self.now, committed=committed)
        self._known = self.window.frontier

    def _route(self, topic: str, message: AnyMessage) -> None:
        """What the broker does: an open of the target goes to the verifiers in turn, all else to who is named."""
        name = topics.parse(topic).name
        if isinstance(message, Open) and name == TARGET:
            self._turn += 1
            name = list(self.verifiers)[self._turn % len(self.verifiers)]
        self._fly(name, topic, message)

    def _fly(self, to: str, topic: str, message: AnyMessage) -> None:
        self.air.append(Flying(to, topic, encode(message)))
        if len(self.air) > 64:
            self.air.pop(0)


def fuzz(data: bytes) -> None:
    """One story: bytes choose the session, then what happens, then the channel is good."""
    choices = Choices(data)
    below = choices.below
    ends = Ends(
        max_tokens=1 + below(10), patience_s=(0.0, 0.25, inf)[below(3)], have=below(4), ahead=(1, 4, 64)[below(3)]
    )
    ends.wait(0.0)
    events = 0
    while choices.left and events < MAX_EVENTS:
        events += 1
        match below(16):
            case 0 | 1 | 2 | 3:
                ends.deliver(0)
            case 4:
                ends.deliver(below(16))
            case 5:
                ends.deliver(below(16), keep=True)
            case 6:
                ends.lose(below(16))
            case 7 | 8:
                ends.step(below(2))
            case 9:
                ends.step(below(2), losing=bool(below(2)), seconds=(STEP_S, 20.0)[below(2)])
            case 10 | 11:
                ends.draft([below(3) > 0 for _ in range(1 + below(3))])
            case 12:
                ends.sibling(below(VOCAB - 1))
            case 13 | 14:
                ends.wait((1 / 64, 0.25, 0.5, 1.0, 2.0, 6.0)[below(6)])
            case 15:
                match below(6):
                    case 4 | 5:
                        ends.another()
                    case 0:
                        ends.kill_verifier(below(2), told=bool(below(2)))
                    case 1:
                        ends.drain(below(2))
                    case other:
                        ends.link(other == 2)
    ends.settle()
