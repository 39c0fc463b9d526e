"""Who holds KV blocks: a small cache, many sessions, and nobody's text suffers."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.engines.base import Outcome, Plan
from cloud.residency import BURST_S, WORTH
from cloud.scheduler import Scheduler
from cloud.usage import Observer
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Commit, Draft, Error, Open, Opened, Resync, encode
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.toys import BLOCK, TARGET, ToyEngine, plain_decode

STEP_S = 0.05


class Timed(ToyEngine):
    """A row that draws takes its 5 ms, one of a prompt 1 ms."""

    def step(self, plan: Plan) -> Outcome:
        read = {work.key: self.pending(work.key) for work in plan.work}
        outcome = super().step(plan)
        drew = sum(1 + len(work.draft) for work in plan.work if work.rows == read[work.key])
        outcome.seconds = 0.05 + 0.005 * drew + 0.001 * (outcome.rows - drew)
        return outcome


class Keeping(Timed):
    """Holds closed texts for those that go on from them, at no cost in blocks."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.kept: list[list[int]] = []

    def open(self, key, ids, sampling, length, tenant="") -> None:
        super().open(key, ids, sampling, length, tenant)
        for text in self.kept:
            if list(ids[: len(text)]) == text:
                self.read[key] = len(text)

    def close(self, key: int) -> None:
        self.kept.append(self.sessions[key][0][: self.read[key]])
        super().close(key)


class Evictions(Observer):
    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def evicted(self, ledger) -> None:
        self.of[ledger.session] += 1


class Room:
    """A verifier, and devices that acknowledge what they hear; `patience_s` by session."""

    def __init__(self, num_blocks: int, *, draft_rows: int = 4, engine: type[Timed] = Timed) -> None:
        self.engine = engine(num_blocks=num_blocks, context=128)
        self.seen = Evictions()
        self.at = Verifier(
            "v",
            self.engine,
            scheduler=Scheduler(64, 16),
            bounds=Bounds(sessions=999, sessions_per_device=999, draft_rows=draft_rows, quiet_s=inf, idle_s=1e6),
            observers=[self.seen],
        )
        self.now = 0.0
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.finished: dict[int, float] = {}
        self._handles: dict[tuple[str, int], int] = {}
        self._devices: dict[int, str] = {}
        self.opened: dict[int, Opened] = {}

    def open(
        self,
        session: int,
        *,
        device: str = "t.board",
        prompt_len: int = 8,
        tokens: int = 24,
        patience: int = 0,
        prompt: tuple[int, ...] = (),
    ) -> None:
        prompt = prompt or tuple(1 + (session * 7 + i * i) % 60 for i in range(prompt_len))
        self.prompts[session], self.texts[session] = prompt, list(prompt)
        message = Open(session, 0, TARGET, len(prompt), Ids(prompt), Sampling(seed=session), tokens, (), patience)
        self.at.receive(topics.open_topic(device, TARGET), encode(message), self.now)
        self._devices[session] = device
        self._hear()

    def draft(self, session: int, ids: list[int]) -> None:
        opened, text = self.opened[session], self.texts[session]
        hash = prefix_hashes(owner_hash(session, "v", 0), text)[-1]
        message = Draft(opened.handle, 0, 1, len(text), hash, Ids(ids))
        self.at.receive(topics.draft_topic(self._devices[session], "v"), encode(message), self.now)

    def step(self) -> bool:
        """One turn of the loop; whether anything was run."""
        self.at.tick(self.now)
        plan = self.at.plan(self.now)
        if plan.work:
            for work in plan.work:
                assert self.engine.blocks(work.key, len(self.engine.sessions[work.key][0])) <= self.engine.num_blocks
            outcome = self.engine.step(plan)
            self.now += outcome.seconds
            self.at.settle(outcome, self.now)
        self._hear()
        return bool(plan.work)

    def run(self, limit: int = 4000) -> None:
        """Until every text is complete."""
        for _ in range(limit):
            if len(self.finished) == len(self.texts):
                return
            if not self.step():
                wake = self.at.wake_at(self.now)
                assert wake < inf, "nobody will ever be served again"
                self.now = max(wake, self.now + 1e-3)
        raise AssertionError(f"{len(self.texts) - len(self.finished)} texts are not complete after {limit} turns")

    def check_texts(self) -> None:
        for session, text in self.texts.items():
            prompt = self.prompts[session]
            expected = plain_decode(prompt, Sampling(seed=session), len(text) - len(prompt))
            assert text[len(prompt) :] == expected

    def _hear(self) -> None:
        for send in self.at.take():
            device, message = topics.parse(send.topic).device, send.message
            if isinstance(message, Opened):
                self._handles[device, message.handle] = message.session
                self.opened[message.session] = message
            elif isinstance(message, Commit):
                session = self._handles[device, message.handle]
                text = self.texts[session]
                del text[message.base :]
                text.extend(message.ids)
                hash = prefix_hashes(owner_hash(session, "v", 0), text)[-1]
                say = Resync(message.handle, 0, len(text), hash)
                if message.finish and session not in self.finished:
                    self.finished[session] = self.now
                    say = Close(session, 0)
                self.at.receive(topics.draft_topic(device, "v"), encode(say), self.now)
            else:
                assert not isinstance(message, Error), message


def test_eight_times_as_many_sessions_as_fit_all_finish_with_the_same_text():
    room = Room(num_blocks=8 * 5)
    for session in range(64):
        room.open(session + 1)
    room.run()
    room.check_texts()
    assert room.engine.sessions == {} and room.engine.free_blocks == room.engine.num_blocks


def test_who_waits_for_room_is_in_the_queue_time():
    """Or a full cache would never make a fleet grow: the few that are in it wait for nothing."""
    crowd, pair = Room(num_blocks=2 * 5), Room(num_blocks=2 * 5)
    for session in range(8):
        crowd.open(session + 1)
    for session in range(2):
        pair.open(session + 1)
    for room in (crowd, pair):
        for _ in range(20):
            room.step()
    assert pair.at.experience.queue_s == 0.0
    assert crowd.at.experience.queue_s > 0.2


def test_boards_that_take_their_time_do_not_keep_the_engine_rebuilding():
    """Each is idle when another speaks, so all could take turns in the cache for ever."""
    room = Room(num_blocks=3 * 8, draft_rows=1)
    for session in range(1, 13):
        room.open(session, prompt_len=40, tokens=60, patience=None)
    speaks_at = {session: 0.1 * session for session in range(1, 13)}
    while room.now < 40.0:
        for session, at in speaks_at.items():
            if at <= room.now and session not in room.finished:
                room.draft(session, [1])
                speaks_at[session] = at + 1.2
        if not room.step():
            room.now += 0.01
    rebuilt_s = sum(ledger.usage.rebuilt_rows for ledger in room.at._by_session.values()) * 0.001
    assert sum(room.seen.of.values()) > 3
    assert rebuilt_s <= 40.0 / WORTH + BURST_S / WORTH
    assert sum(len(text) - 40 for text in room.texts.values()) > 60


def test_a_next_turn_that_holds_most_blocks_from_the_start_is_served():
    room = Room(num_blocks=10, engine=Keeping)
    room.open(1, tokens=48)
    room.run()
    room.open(2, prompt=tuple(room.texts[1]), tokens=20)
    assert room.engine.free_blocks == 10 - 7 and room.engine.pending(2) == 1
    room.run()
    room.check_texts()
    assert not room.seen.of


def test_a_next_turn_whose_board_is_silent_makes_room_for_others():
    room = Room(num_blocks=10, engine=Keeping)
    room.open(1, tokens=48)
    room.run()
    room.open(2, prompt=tuple(room.texts[1]), tokens=20, patience=10**9)
    room.open(3, tokens=24)
    while 3 not in room.finished:
        assert room.step() or room.now < 60
        room.now += 0.01
    assert room.seen.of == {2: 1}
    room.draft(2, [1])
    while len(room.texts[2]) == len(room.prompts[2]):
        assert room.step()
    room.check_texts()


def test_where_all_fit_nobody_is_evicted():
    room = Room(num_blocks=64 * 5)
    for session in range(64):
        room.open(session + 1)
    room.run()
    assert not room.seen.of and room.at.residency.evictions == 0


def test_the_session_that_has_been_idle_longest_goes_first_and_comes_back_when_it_speaks():
    room = Room(num_blocks=3 * 4)
    for session in (1, 2, 3):
        room.open(session, patience=None)
        room.step()
    room.draft(2, [1])
    room.step()
    room.open(4)
    room.step()
    assert room.seen.of == {1: 1}, "2 has spoken since, and 3 came later"
    while room.step():
        pass
    assert room.engine.read[1] == 0, "nobody reads it again before its device speaks"
    room.draft(1, [1])
    room.step()
    room.step()
    assert len(room.texts[1]) > len(room.prompts[1])
    room.check_texts()


def test_rebuilding_stays_a_small_part_of_the_time():
    room = Room(num_blocks=8 * 16, draft_rows=4)
    for session in range(24):
        room.open(session + 1, prompt_len=60, tokens=60)
    usage = [ledger.usage for ledger in room.at._by_session.values()]
    room.run()
    rebuilt = sum(each.rebuilt_rows for each in usage)
    assert rebuilt * 0.001 <= 0.25 * sum(each.engine_s for each in usage)
    assert min(room.finished.values()) > 0.3 * max(room.finished.values()) or not rebuilt


def test_those_who_wait_get_their_turn_long_before_the_others_are_done():
    room = Room(num_blocks=2 * 9)
    for prefill in [0, 16] * 30:
        room.at.experience.cost.learn(2, 0.06 + prefill * 0.001, prefill=prefill)
    for session in range(4):
        room.open(session + 1, tokens=60)
    begun: dict[int, int] = {}
    for turn in range(400):
        room.step()
        for session, text in room.texts.items():
            if len(text) > 8:
                begun.setdefault(session, turn)
        if len(begun) == 4:
            break
    assert not room.finished, "all have begun before the first is done"


def test_a_tenant_that_fills_the_cache_makes_room_for_another():
    room = Room(num_blocks=4 * 9)
    for session in range(8):
        room.open(session + 1, device=f"big.b{session}", tokens=60)
    for _ in range(3):
        room.step()
    room.open(100, device="small.b", tokens=10)
    for _ in range(14):
        room.step()
    assert 100 in room.finished, "it waited for nobody's turn to end"
    room.run()
    room.check_texts()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 40), st.integers(1, 25))
def test_no_order_of_arrivals_ever_takes_more_blocks_than_there_are(seed, num_blocks, num_sessions):
    """The toy engine asserts it in every step."""
    rng = random.Random(seed)
    room = Room(num_blocks=max(num_blocks, -(-(60 + 4) // BLOCK) + 1))
    left = list(range(1, num_sessions + 1))
    while left or len(room.finished) < len(room.texts):
        if left and rng.random() < 0.3:
            session = left.pop()
            room.open(
                session,
                device=f"t{rng.randrange(3)}.b",
                prompt_len=rng.randrange(1, 40),
                tokens=rng.randrange(1, 20),
                patience=rng.choice([0, 0, 200, 2000]),
            )
        speaking = [session for session in room.opened if session not in room.finished]
        if speaking and rng.random() < 0.5:
            room.draft(rng.choice(speaking), [rng.randrange(60) for _ in range(rng.randrange(1, 5))])
        if not room.step():
            room.now += 0.05
        assert room.now < 1000
    room.check_texts()


@pytest.mark.parametrize("patience", [0, None])
def test_a_session_that_grows_is_never_without_a_next_block(patience):
    room = Room(num_blocks=14)
    room.open(1, tokens=100, patience=patience)
    room.open(2, tokens=100, patience=0)
    for _ in range(60):
        if patience is None and 1 in room.opened and 1 not in room.finished:
            room.draft(1, [1, 2, 3])
        room.step()
    room.check_texts()
    assert len(room.texts[2]) > 30
