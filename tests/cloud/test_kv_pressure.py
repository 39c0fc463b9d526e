"""Any order of arrivals under a small budget: never a block too many, never another text, memory within the budget."""

from __future__ import annotations

import random
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from cloud.engines.base import Plan, Work  # noqa: E402
from cloud.engines.kv import Slab  # noqa: E402
from cloud.engines.model import Forward, load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.torch_engine import TorchEngine, load  # noqa: E402
from protocol.sampling import Sampling  # noqa: E402
from tests.cloud.tiny_target import BLOCK_BYTES, VOCAB, decode, no_draft, prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_BLOCKS = 14
MAX_DRAFT = 6
NEW = 40  # tokens that a session may write
SESSIONS = 6


class Oracle:
    """What each text goes on with: plain decoding, alone."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, text: list[int], sampling: Sampling) -> list[int]:
        key = (tuple(text), sampling.seed)
        if key not in self._known:
            [self._known[key]] = decode(self.engine, [text], sampling, NEW, no_draft)
        return self._known[key]


class Client:
    """Drives an engine as its contract says, and compares every token with the oracle's."""

    def __init__(self, engine: TorchEngine, oracle: Oracle) -> None:
        self.engine, self.oracle = engine, oracle
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[list[int], Sampling, str]] = {}
        self.finished: list[tuple[list[int], str]] = []

    def open(self, key: int, text: list[int], sampling: Sampling, tenant: str) -> None:
        self.engine.open(key, text, sampling, len(text) + NEW, tenant)
        assert 1 <= self.engine.pending(key) <= len(text)
        self.texts[key], self.prompts[key] = list(text), (text, sampling, tenant)

    def close(self, key: int) -> None:
        self.finished.append((self.texts.pop(key), self.prompts.pop(key)[2]))
        self.engine.close(key)

    def evict(self, key: int) -> None:
        self.engine.evict(key)
        assert self.engine.pending(key) == len(self.texts[key]) and self.engine.blocks(key) == 0

    def step(self, generator: random.Random) -> None:
        """A step for some of the sessions, as many as the blocks allow; others are evicted for them at times."""
        engine, free = self.engine, self.engine.free_blocks
        keys = generator.sample(sorted(self.texts), generator.randrange(1, len(self.texts) + 1))
        work = []
        for key in keys:
            need = engine.blocks(key, len(self.texts[key])) - engine.blocks(key)
            if need > free and generator.random() < 0.5:
                for other in self.texts.keys() - set(keys):
                    self.evict(other)
                free = engine.free_blocks - sum(
                    engine.blocks(one.key, len(self.texts[one.key])) - engine.blocks(one.key) for one in work
                )
            if need <= free:
                free -= need
                work.append(self.work(key, generator))
        outcome = engine.step(Plan(work))
        assert not outcome.failed and not outcome.evicted
        for key, ids in outcome.accepted.items():
            prompt, sampling, _ = self.prompts[key]
            self.texts[key] += ids
            written = self.texts[key][len(prompt) :]
            truth = self.oracle(prompt, sampling)
            assert written[:NEW] == truth[: len(written)]
            if len(written) >= NEW - MAX_DRAFT:
                self.close(key)

    def work(self, key: int, generator: random.Random) -> Work:
        pending = self.engine.pending(key)
        rows = min(generator.choice([1, 7, 40, 64, 500]), pending)
        if rows < pending:
            return Work(key, rows)
        prompt, sampling, _ = self.prompts[key]
        known = self.oracle(prompt, sampling)[len(self.texts[key]) - len(prompt) :]
        parents = [generator.randrange(-1, i) if i else -1 for i in range(generator.randrange(MAX_DRAFT + 1))]
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        draft = [known[d] if generator.random() < 0.7 else generator.randrange(VOCAB - 1) for d in depth]
        return Work(key, rows, draft, parents)


@pytest.fixture(scope="module")
def forward(targets: dict[str, Path]) -> Forward:
    return load_model(targets["llama"], "float32", Numerics(mode="exact"))


@pytest.fixture(scope="module")
def oracle(targets: dict[str, Path]) -> Oracle:
    return Oracle(load(targets["llama"], Numerics(mode="exact"), kv_bytes=200 * BLOCK_BYTES))


def resident_bytes(engine: TorchEngine) -> int:
    """Memory behind the slabs' addresses that is theirs alone, and memory that they share, by the system's account."""
    cache = engine._cache
    return sum(own_bytes(held.slab) for held in (*cache._open, *cache._closed)) + cache._store.num_bytes


def own_bytes(slab: Slab) -> int:
    """Pages that are there, mapped only here, and no file's. The page of zeros behind what is only read is not."""
    at, size = slab.kv.data_ptr(), slab.kv.untyped_storage().nbytes()
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(at // PAGESIZE * 8)
        pages = np.frombuffer(pagemap.read(size // PAGESIZE * 8), np.uint64)
    present, only_here, of_file = (pages >> np.uint64(bit) & np.uint64(1) for bit in (63, 56, 61))
    return int((present & only_here & ~of_file & np.uint64(1)).sum()) * PAGESIZE


def test_memory_is_measured_to_the_page(forward: Forward, oracle: Oracle) -> None:
    engine = TorchEngine(forward, oracle.engine.info, kv_bytes=NUM_BLOCKS * BLOCK_BYTES, max_draft=MAX_DRAFT)
    [text] = prompts(150)
    assert resident_bytes(engine) == 0
    for key, tenant in enumerate("aab"):
        engine.open(key, text, Sampling(), 160, tenant)
        engine.step(Plan([Work(key, engine.pending(key))]))
    assert resident_bytes(engine) == (4 + 1 + 1 + 5) * BLOCK_BYTES
    for key in range(3):
        engine.close(key)
    assert resident_bytes(engine) == (4 + 1 + 1 + 5) * BLOCK_BYTES, "retained"


# Without shrinking, which takes minutes: the seed and the moves are short enough to be replayed.
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**32), moves=st.lists(st.sampled_from("ooosssssssssec"), min_size=20, max_size=60))
def test_any_order_of_arrivals(forward: Forward, oracle: Oracle, seed: int, moves: list[str]) -> None:
    engine = TorchEngine(forward, oracle.engine.info, kv_bytes=NUM_BLOCKS * BLOCK_BYTES, max_draft=MAX_DRAFT)
    client, generator, stems = Client(engine, oracle), random.Random(seed), prompts(150, 150)
    for i, move in enumerate(moves):
        if move == "o" and len(client.texts) < SESSIONS:
            text, tenant = generator.choice(stems)[: generator.randrange(20, 150)], generator.choice("ab")
            if client.finished and generator.random() < 0.5:
                text, tenant = generator.choice(client.finished)
                text = text[: generator.randrange(len(text) // 2, len(text) + 1)]
            text = [*text, *(generator.randrange(VOCAB - 1) for _ in range(generator.randrange(4)))][:300]
            client.open(i, text, Sampling(temperature=0.8, seed=generator.randrange(3)), tenant)
        elif move == "s" and client.texts:
            client.step(generator)
        elif move == "e" and client.texts:
            client.evict(generator.choice(sorted(client.texts)))
        elif move == "c" and client.texts:
            client.close(generator.choice(sorted(client.texts)))
        assert 0 <= engine.retained_blocks <= engine.free_blocks <= NUM_BLOCKS
        assert resident_bytes(engine) <= NUM_BLOCKS * BLOCK_BYTES
    for key in list(client.texts):
        client.close(key)
    assert engine.free_blocks == NUM_BLOCKS
