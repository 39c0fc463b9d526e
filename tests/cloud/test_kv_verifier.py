"""A verifier over the torch engine with little memory: fleets with a common prompt, next turns, all texts as alone."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloud.engines.base import Outcome  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.torch_engine import TorchEngine, load  # noqa: E402
from cloud.scheduler import Scheduler  # noqa: E402
from cloud.verifier import Bounds, Verifier  # noqa: E402
from protocol import topics  # noqa: E402
from protocol.messages import Close, Commit, Error, Open, Opened, Resync, encode  # noqa: E402
from protocol.sampling import Sampling  # noqa: E402
from protocol.text import Ids, owner_hash, prefix_hashes  # noqa: E402
from tests.cloud.tiny_target import BLOCK_BYTES, decode, no_draft, prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = Numerics(mode="exact")
TOKENS = 24
DRAFT_ROWS = 4


class Fleet:
    """Devices that acknowledge what they hear and close when their text is complete. One session each."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        bounds = Bounds(sessions=999, draft_rows=DRAFT_ROWS, quiet_s=inf, idle_s=1e6)
        self.at = Verifier("v", engine, scheduler=Scheduler(128, 32), bounds=bounds)
        self.texts: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.rows = 0
        self._now = 0.0
        self._sessions: dict[str, int] = {}

    def open(self, device: str, session: int, prompt: list[int]) -> None:
        self.texts[device] = list(prompt)
        self.finished.discard(device)
        target = self.engine.info.id
        message = Open(session, 0, target, len(prompt), Ids(tuple(prompt)), Sampling(), TOKENS, (), 0)
        self.at.receive(topics.open_topic(device, target), encode(message), self._now)
        self._hear()

    def run(self) -> None:
        for _ in range(3000):
            if len(self.finished) == len(self.texts):
                return
            outcome = Outcome()
            plan = self.at.plan(self._now)
            if plan.work:
                outcome = self.engine.step(plan)
                assert not outcome.failed and self.engine.free_blocks >= 0
                self.rows += outcome.rows
                self._now += 0.02 + 0.001 * outcome.rows
                outcome.seconds = 0.02 + 0.001 * outcome.rows
                self.at.settle(outcome, self._now)
            else:
                self._now = max(self._now + 0.001, self.at.wake_at(self._now))
            self.at.tick(self._now)
            self._hear()
        raise AssertionError(f"only {sorted(self.finished)} are complete")

    def _hear(self) -> None:
        for send in self.at.take():
            device, message = topics.parse(send.topic).device, send.message
            assert not isinstance(message, Error), message
            if isinstance(message, Opened):
                self._sessions[device] = message.session
            elif isinstance(message, Commit):
                text, opened = self.texts[device], self._sessions[device]
                del text[message.base :]
                text.extend(message.ids)
                say: Resync | Close = Close(opened, 0)
                if not message.finish:
                    say = Resync(message.handle, 0, len(text), prefix_hashes(owner_hash(opened, "v", 0), text)[-1])
                else:
                    self.finished.add(device)
                self.at.receive(topics.draft_topic(device, "v"), encode(say), self._now)


def test_fleets_in_little_memory_write_what_they_would_write_alone(targets: dict[str, Path]) -> None:
    """Two tenants, each with its system prompt, 20 boards, memory for 4 of them; then a second turn of each."""
    engine = load(targets["llama"], EXACT, kv_bytes=20 * BLOCK_BYTES, max_draft=DRAFT_ROWS)
    oracle = load(targets["llama"], EXACT, kv_bytes=999 * BLOCK_BYTES, max_draft=DRAFT_ROWS)
    fleet = Fleet(engine)
    systems, own = prompts(70, 70), prompts(*[12] * 20)
    asked = {f"tenant{i % 2}.board{i}": systems[i % 2] + own[i] for i in range(20)}
    for turn in (0, 1):
        for i, (device, prompt) in enumerate(asked.items()):
            fleet.open(device, 100 * turn + i + 1, prompt)
        fleet.run()
        for device, prompt in asked.items():
            [truth] = decode(oracle, [prompt], Sampling(), TOKENS, no_draft)
            assert fleet.texts[device][len(prompt) :] == truth, device
            asked[device] = [*fleet.texts[device], 5, 6, 7]
        assert engine.free_blocks == 20


def test_a_fleets_rows_are_those_of_one_prompt_and_its_own_tokens(targets: dict[str, Path]) -> None:
    engine = load(targets["llama"], Numerics(), kv_bytes=200 * BLOCK_BYTES, max_draft=DRAFT_ROWS)
    fleet = Fleet(engine)
    [system], own = prompts(200), prompts(*[8] * 12)
    for i, tail in enumerate(own):
        fleet.open(f"acme.board{i}", i + 1, system + tail)
    fleet.run()
    assert fleet.rows < 200 + 12 * (8 + 32 + TOKENS)
