"""Boards in a closed loop at one verifier, without a network: each has its next guesses there whenever it hears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, cycle
from math import inf
from typing import Any

from cloud.cost import StepCost
from cloud.engines.base import Engine, Plan, Work
from cloud.scheduler import Scheduler
from cloud.tenants import Contract
from cloud.usage import Observer
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Commit, Draft, Error, Message, Open, Opened, Resync, encode
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes

LOOK_S = 0.01
CHUNK = 32  # of a prompt in a step

Guesser = Callable[[Sequence[int], int], Sequence[int]]
"""(the script's ids, how many of them are there) -> guesses for what comes next."""


@dataclass(frozen=True)
class Script:
    """A prompt and what the target writes behind it."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


def write_scripts(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[Script]:
    """What the engine writes greedily behind each prompt, all in the same steps, without drafts."""
    texts: dict[int, list[int]] = {-1 - i: [] for i in range(len(prompts))}
    for key, prompt in zip(texts, prompts, strict=True):
        engine.open(key, prompt, Sampling(), len(prompt) + tokens)
    while left := [key for key, text in texts.items() if len(text) < tokens]:
        outcome = engine.step(Plan([Work(key, min(CHUNK, engine.pending(key))) for key in left]))
        for key, ids in outcome.accepted.items():
            texts[key] += ids
    for key in texts:
        engine.close(key)
    return [Script(tuple(prompt), tuple(text)) for prompt, text in zip(prompts, texts.values(), strict=True)]


def right_so_often(acceptance: float, rows: int, seed: int = 0) -> Guesser:
    """Chains of `rows` in which each guess is right with that chance; which are wrong is fixed by script and place."""

    def guess(target: Sequence[int], done: int) -> Sequence[int]:
        made = []
        for at in range(done, min(done + rows, len(target))):
            lot = hash((seed, at, target[at], len(target), target[0])) % 10_000 / 10_000
            made.append(target[at] if lot < acceptance else target[at] ^ 1)
        return made

    return guess


def no_guesses(target: Sequence[int], done: int) -> Sequence[int]:
    return ()


@dataclass
class Board:
    """Asks for one text after another. pause_s: how long it takes to answer; heeds_advice: whether it drafts as many
    rows as the verifier welcomes and no more, as boards do; texts: ids of those that are complete.
    """

    device: str
    scripts: Iterator[Script]
    guess: Guesser = no_guesses
    patience_ms: int | None = 0
    pause_s: float = 0.0
    heeds_advice: bool = False
    advice: int | None = None
    tokens: int = 0
    texts: list[list[int]] = field(default_factory=list)
    expected: list[tuple[int, ...]] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    script: Script | None = None
    session: int = 0
    handle: int = -1


class Loop:
    """One verifier and its boards. Time is real; what a step takes is what the engine took."""

    def __init__(
        self,
        engine: Engine,
        boards: Sequence[Board],
        *,
        scheduler: Scheduler | None = None,
        contracts: Mapping[str, Contract] | None = None,
        cost: StepCost | None = None,
        draft_rows: int = 48,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.verifier = Verifier(
            "bench",
            engine,
            scheduler=scheduler or Scheduler(),
            bounds=Bounds(
                sessions=1 << 30, sessions_per_device=1 << 30, draft_rows=draft_rows, quiet_s=inf, idle_s=inf
            ),
            contracts=contracts,
            cost=cost,
            observers=observers,
        )
        self.boards = {board.device: board for board in boards}
        self._sessions = count(1)
        self._thinking: list[tuple[float, str]] = []
        for board in boards:
            self._ask(board)

    def run(self, seconds: float = inf, *, until: Callable[[], bool] = lambda: False) -> float:
        """Step for so long, or until that holds; returns the seconds."""
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds and not until():
            self.step()
        return passed

    def step(self) -> None:
        """One turn of a gateway's loop."""
        now = time.perf_counter()
        while self._thinking and self._thinking[0][0] <= now:
            self._draft(self.boards[heappop(self._thinking)[1]])
        plan = self.verifier.plan(now)
        if plan.work:
            outcome = self.verifier.engine.step(plan)
            self.verifier.settle(outcome, time.perf_counter())
        elif self._thinking:
            time.sleep(max(0.0, min(self._thinking[0][0] - now, LOOK_S)))
        self._hear()

    def tokens(self) -> dict[str, int]:
        """Committed tokens by tenant."""
        found: dict[str, int] = {}
        for board in self.boards.values():
            tenant = topics.tenant_of(board.device)
            found[tenant] = found.get(tenant, 0) + board.tokens
        return found

    def _ask(self, board: Board) -> None:
        script = next(board.scripts, None)
        if script is None:
            board.script = None
            return
        board.advice = None
        board.script, board.text, board.session = script, list(script.prompt), next(self._sessions)
        message = Open(
            board.session,
            0,
            self.verifier.engine.info.id,
            len(script.prompt),
            Ids(script.prompt),
            Sampling(),
            len(script.target),
            (),
            board.patience_ms,
        )
        self._say(board, topics.open_topic(board.device, "bench"), message)
        self._hear()

    def _say(self, board: Board, topic: str, message: Message) -> None:
        self.verifier.receive(topic, encode(message), time.perf_counter())  # type: ignore[arg-type]

    def _hear(self) -> None:
        while sends := self.verifier.take():
            for send in sends:
                self._answer(self.boards[topics.parse(send.topic).device], send.message)

    def _answer(self, board: Board, message: Message) -> None:
        topic = topics.draft_topic(board.device, "bench")
        match message:
            case Error():
                raise AssertionError(f"{board.device}: {message.code}: {message.what}")
            case Opened():
                board.handle = message.handle
                self._think(board)
            case Commit() if board.script and message.handle == board.handle and message.base == len(board.text):
                board.text += message.ids
                board.tokens += len(message.ids)
                if message.advice is not None and board.heeds_advice:
                    board.advice = message.advice
                if message.finish:
                    board.texts.append(board.text[len(board.script.prompt) :])
                    board.expected.append(board.script.target)
                    self._say(board, topic, Close(board.session, 0))
                    self._ask(board)
                else:
                    self._think(board)

    def _think(self, board: Board) -> None:
        if board.pause_s:
            heappush(self._thinking, (time.perf_counter() + board.pause_s, board.device))
        else:
            self._draft(board)

    def _draft(self, board: Board) -> None:
        if board.script is None:
            return
        topic = topics.draft_topic(board.device, "bench")
        ids = board.guess(board.script.target, len(board.text) - len(board.script.prompt))[: board.advice]
        hash = prefix_hashes(owner_hash(board.session, "bench", 0), board.text)[-1]
        if ids:
            message: Message = Draft(board.handle, 0, 0, len(board.text), hash, Ids(ids))
        else:
            message = Resync(board.handle, 0, len(board.text), hash)
        self._say(board, topic, message)


def many(
    tenant: str, num: int, scripts: Sequence[Script], guess: Guesser, *, first: int = 0, **options: Any
) -> list[Board]:
    """So many boards of a tenant, numbered from `first` on, each at another script."""

    def turned(i: int) -> Iterator[Script]:
        at = i % len(scripts)
        return cycle([*scripts[at:], *scripts[:at]])

    return [Board(f"{tenant}.b{i}", turned(i), guess, **options) for i in range(first, first + num)]
