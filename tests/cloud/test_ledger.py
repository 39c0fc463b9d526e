"""One session's facts and guesses, message by message."""

from __future__ import annotations

from math import inf

import pytest

from cloud.ledger import Ledger, LedgerError
from protocol.messages import Draft, Limits, Open
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from protocol.tree import Node, deltas_of

LIMITS = Limits(draft_rows=6, ahead=8, context=40, vocab_size=100)
PROMPT = (11, 12, 13)


def ledger(
    *, quiet_s: float = inf, patience_ms: int | None = 0, max_tokens: int = 20, stop_ids=(), committed=()
) -> Ledger:
    opened = Open(5, 1, "t", 3, Ids(PROMPT + tuple(committed)), Sampling(), max_tokens, stop_ids, patience_ms)
    return Ledger("a.b", opened, verifier="v", handle=0, key=1, limits=LIMITS, now=0.0, quiet_s=quiet_s)


def draft(text, ids, *, have=None, parents=None, seq=1) -> Draft:
    hash = prefix_hashes(owner_hash(5, "v", 1), text)[-1]
    deltas = deltas_of(parents) if parents else ()
    lead = 0 if have is None else len(text) - have
    return Draft(0, 1, seq, len(text), hash, Ids(ids), lead, Ids(deltas))


def guesses(session: Ledger) -> list[Node]:
    """Those that are worth a row, in the order in which they came."""
    found = [session.tree.root]
    for node in found:
        found += [child for _, child in session.guesses_behind(node)]
    return [node for node in session.tree if node in found]


def rows(session: Ledger) -> list[int]:
    return [node.id for node in guesses(session)]


def test_a_draft_is_grafted_where_its_text_ends():
    session = ledger()
    assert session.graft(draft(PROMPT, [1, 2]), 0.0).new == 2
    assert session.graft(draft([*PROMPT, 1, 2], [3], have=3), 0.0).new == 1
    assert session.graft(draft([*PROMPT, 1], [7], have=3), 0.0).new == 1
    assert rows(session) == [1, 2, 3, 7]


def test_a_draft_that_comes_twice_counts_once():
    session = ledger()
    session.graft(draft(PROMPT, [1, 2]), 0.0)
    again = session.graft(draft(PROMPT, [1, 2]), 0.0)
    assert (again.new, again.known) == (0, 2) and rows(session) == [1, 2]


def test_the_part_of_a_draft_that_is_already_text_is_dropped_before_any_work():
    session = ledger()
    session.commit([1, 2], 0.0)
    assert session.graft(draft(PROMPT, [1, 2, 3]), 0.0).new == 1
    assert rows(session) == [3]


def test_a_draft_that_left_the_text_is_dropped_whole():
    session = ledger()
    session.commit([1, 9], 0.0)
    late = session.graft(draft(PROMPT, [1, 2, 3]), 0.0)
    assert (late.new, late.stale) == (0, 3) and rows(session) == []


def test_a_sibling_that_is_the_text_carries_its_continuation_over():
    session = ledger()
    session.commit([4], 0.0)
    session.graft(draft(PROMPT, [1, 4, 2, 5], parents=[-1, -1, 0, 1]), 0.0)
    assert rows(session) == [5]


def test_a_draft_ahead_of_its_predecessor_waits_for_it():
    session = ledger()
    assert session.graft(draft([*PROMPT, 1, 2], [3], have=3, seq=2), 0.0).held
    session.graft(draft(PROMPT, [1, 2], seq=1), 0.0)
    assert rows(session) == [1, 2, 3]


def test_a_draft_whose_predecessor_is_lost_is_dropped_after_a_step():
    session = ledger()
    session.graft(draft([*PROMPT, 1, 2], [3], have=3), 0.0)
    session.commit([8], 0.0)
    session.commit([8], 0.0)
    session.graft(draft([*PROMPT, 8, 8], [1, 2], have=3), 0.0)
    assert rows(session) == [1, 2]


def test_a_right_guess_stays_grafted_over_a_commit():
    session = ledger()
    session.graft(draft(PROMPT, [1, 2, 3, 7], parents=[-1, 0, 1, 1]), 0.0)
    base, guessed = session.commit([1, 2], 0.0)
    assert (base, guessed) == (3, 2) and sorted(rows(session)) == [3, 7]


def test_a_commit_ends_at_a_stop_id_and_at_the_last_token():
    session = ledger(stop_ids=(50,))
    session.commit([1, 50, 2], 0.0)
    assert session.text[3:] == [1, 50] and session.finish == "stop" and not session.may_run()
    short = ledger(max_tokens=2)
    short.commit([1, 2, 3], 0.0)
    assert short.text[3:] == [1, 2] and short.finish == "length"
    full = ledger(max_tokens=1000)
    full.commit(list(range(1, 38)), 0.0)
    assert full.frontier == 40 and full.finish == "context"


def test_what_was_complete_before_is_complete_at_once():
    assert ledger(committed=(1, 50), stop_ids=(50,)).finish == "stop"
    assert ledger(committed=(1, 2), max_tokens=2).finish == "length"


def test_it_runs_no_further_ahead_of_the_device_than_announced():
    session = ledger()
    session.graft(draft(PROMPT, [1, 2, 3, 4, 5, 6]), 0.0)
    session.commit([1, 2, 3, 4, 5], 0.0)
    assert [node.position for node in guesses(session)] == [8]
    session.commit([6, 7, 8], 0.0)
    assert not session.may_run()
    session.heard(7, None, 1.0)
    assert session.may_run()


def test_patience():
    assert ledger().due_at() == 0.0
    patient = ledger(patience_ms=250)
    assert patient.due_at() == 0.25
    patient.commit([1], 3.0)
    assert patient.due_at() == 3.25
    waiting = ledger(patience_ms=None)
    assert waiting.due_at() == inf
    waiting.graft(draft(PROMPT, [1]), 0.5)
    assert waiting.due_at() == 0.0


def test_a_device_that_is_gone_gets_no_more_steps_until_it_is_heard_again():
    session = ledger(quiet_s=2.5)
    session.commit([1], 2.4)
    assert session.due_at() == 2.4
    session.commit([1], 2.5)
    assert session.due_at() == inf
    session.heard(3, None, 3.0)
    assert session.due_at() == 2.5


def test_nobody_waits_for_a_draft_of_the_last_token():
    session = ledger(patience_ms=None, max_tokens=2)
    session.commit([1], 1.0)
    assert session.due_at() == 1.0 and rows(session) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (draft(PROMPT, [100]), "outside the vocabulary"),
        (draft(PROMPT, [1] * 7), "over the limit"),
        (Draft(0, 1, 1, 3, 0, Ids((1, 2)), 0, Ids((1, 9))), "not describe a tree"),
        (Draft(0, 1, 1, 2, 0, Ids((1,))), "within the prompt"),
        (draft([*PROMPT, 1, 2], [3], have=5), "says it has 5"),
    ],
)
def test_a_draft_that_breaks_the_limits_is_an_error(bad, why):
    session = ledger()
    with pytest.raises(LedgerError, match=why):
        session.graft(bad, 0.0)
    assert session.text == list(PROMPT) and rows(session) == []


def test_the_tree_never_grows_over_its_limit():
    session = ledger()
    session.graft(draft(PROMPT, [1, 2, 3, 4, 5, 6]), 0.0)
    assert session.graft(draft(PROMPT, [7, 8]), 0.0).stale == 2
    assert len(session.tree) == 6


def test_a_device_with_another_text_is_noticed():
    session = ledger()
    session.commit([1, 2], 0.0)
    good = prefix_hashes(owner_hash(5, "v", 1), [*PROMPT, 1])[-1]
    session.heard(4, good, 0.0)
    with pytest.raises(LedgerError, match="differs"):
        session.heard(4, good ^ 1, 0.0)


def test_news_tell_time_and_advice_only_when_they_change():
    session = ledger()
    session.commit([1], 0.0)
    told = session.news(3, 0.0, 60_000, price=0.0)
    assert told.step_us == 60_000 and told.advice > 0
    for step_us in (61_000, 0):
        again = session.news(3, 0.0, step_us)
        assert (again.step_us, again.advice, list(again.ids)) == (None, None, [1])
    assert session.news(3, 0.0, 90_000).step_us == 90_000


def test_the_age_of_a_draft_is_told_once_often_at_first_and_seldom_later():
    session = ledger()
    told: list[int | None] = []
    for seq in range(20):
        session.graft(draft(session.text[:], [1], seq=seq), now=float(seq))
        base, _ = session.commit([9], seq + 0.075)
        told.append(session.news(base, seq + 0.075).age_ms)
        assert session.news(base, seq + 0.5).age_ms is None, "said again, it would be another age"
        session.heard(session.frontier, None, seq + 0.6)
    assert told[:8] == [75] * 8 and told[8:].count(75) == 3 and set(told) == {75, None}
    base, _ = session.commit([9], 30.0)
    assert session.news(base, 30.0).age_ms is None, "no draft has come"
