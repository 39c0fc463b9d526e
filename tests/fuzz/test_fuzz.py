"""The fuzz targets, for seconds: kept inputs are told again everywhere, atheris runs where it is installed, and each
target notices when what it watches is broken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import cloud.experience
import cloud.ledger
import edge.drafters.rank
import link.packets
import protocol.messages
import tests.fuzz.board
from cloud.ledger import Ledger, LedgerError
from edge.drafters.native import NativeForward
from edge.window import Window
from native import board
from protocol.text import Ids
from protocol.tree import DraftTree
from tests.fuzz import __main__ as runner
from tests.fuzz.kept import read_corpus
from tests.fuzz.targets import TARGETS

SMOKE = {"messages": 10_000, "packets": 10_000, "ledger": 3000, "window": 2000, "ends": 200, "board": 200}
TRIES = {"messages": 3000, "packets": 3000, "ledger": 1500, "window": 2500, "ends": 150, "board": 150}


@pytest.fixture(autouse=True)
def built(request):
    if "board" in request.node.name and board.find() is None:
        pytest.skip("neither the board's library nor a C compiler is here")


@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_inputs_find_nothing(name):
    take, kept = TARGETS[name].load(), read_corpus(name)
    assert kept
    for data in [*kept, *TARGETS[name].seeds()]:
        take(data)


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: pip install '.[fuzz]'")
@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "FOUND", tmp_path)
    monkeypatch.setattr(runner, "read_corpus", lambda name: [])
    assert runner.fuzz(name, SMOKE[name], seed=1), capsys.readouterr().err
    assert any((tmp_path / name / "corpus").iterdir()), "no input has reached anything new"


def believes_all_hashes(window, message, now):
    at = message.base - window.prompt_len
    if window.owned and 0 <= at < len(window._hashes):
        message = type(message)(message.handle, message.epoch, message.base, window._hashes[at], message.ids)
    ON_COMMIT(window, message, now)


def grafts_anywhere(ledger, draft, parents):
    for id in draft.ids:
        ledger.tree.add(ledger.tree.root, id)
    return cloud.ledger.Grafted(new=len(draft.ids))


def keeps_the_tree(tree, ids):
    kept = ADVANCE(tree, ids)
    if not kept:
        tree.add(tree.root, 1)
    return kept


def refuses_much(ledger, have, hash, now):
    if have < ledger.frontier:
        raise LedgerError("the device is behind")
    HEARD(ledger, have, hash, now)


def ranks_another_position(logits, position, sampling, n, ids=None):
    return RANK(logits, position + 1, sampling, n, ids)


RANK = edge.drafters.rank.rank
ON_COMMIT, ADVANCE, HEARD, UNPACK = Window._on_commit, DraftTree.advance, Ledger.heard, protocol.messages.unpack
BROKEN = {
    "messages: no checks": ("messages", protocol.messages, "_check", lambda message: None),
    "messages: an id too many": ("messages", protocol.messages, "unpack", lambda data: Ids((*UNPACK(data), 1))),
    "packets: another alias": ("packets", link.packets, "ALIAS_ALONE", 2),
    "packets: QoS 1 is read": ("packets", link.packets, "QOS", 0),
    "ledger: no limits": ("ledger", Ledger, "_check", lambda ledger, draft: list(range(-1, len(draft.ids) - 1))),
    "ledger: guesses of another text": ("ledger", Ledger, "_place", grafts_anywhere),
    "ledger: wrong guesses stay": ("ledger", DraftTree, "advance", keeps_the_tree),
    "ledger: refuses what is true": ("ledger", Ledger, "heard", refuses_much),
    "window: any owner": ("window", Window, "_on_commit", believes_all_hashes),
    "window: any id": ("window", Window, "_in_vocabulary", lambda window, ids: True),
    "window: never asks": ("window", Window, "_open", lambda window, now: None),
    "window: guesses stay said": ("window", Window, "_forget_sent", lambda window: None),
    "board: noise of another position": ("board", tests.fuzz.board, "rank", ranks_another_position),
    "board: what is kept does not move": ("board", NativeForward, "move", lambda forward, slots, first: None),
    "ends: nobody leaves a dead owner": ("ends", Window, "_reopen", lambda window, now, why, retry_s=None: None),
    "ends: a number too great for the wire": ("ends", cloud.experience, "MAX_COUNT", 1 << 40),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_noticed(fault, monkeypatch):
    name, where, what, instead = BROKEN[fault]
    take = TARGETS[name].load()
    monkeypatch.setattr(where, what, instead)
    with pytest.raises(Exception):  # noqa: B017 (an assertion, or what the broken module raises)
        for data in inputs(name):
            take(data)


@pytest.mark.parametrize("name", TARGETS)
def test_without_a_fault_the_same_inputs_find_nothing(name):
    take = TARGETS[name].load()
    for data in inputs(name):
        take(data)


def inputs(name: str) -> Iterator[bytes]:
    """Kept inputs with a few bytes changed, and noise."""
    rng, seeds = random.Random(1), [*read_corpus(name), *TARGETS[name].seeds()]
    for i in range(TRIES[name]):
        data = bytearray(rng.randbytes(rng.randrange(TARGETS[name].most_bytes)) if i % 2 else rng.choice(seeds))
        for _ in range(rng.randrange(3) if data else 0):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data)
