"""A ledger under drafts, claims, steps and evictions in any order: its facts stay, its guesses are somebody's."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.fuzz.ledger import LIMITS, OUTSIDE, PRICES, STOP, VOCAB, CheckedLedger

IDS = st.integers(0, VOCAB - 1)
PATIENCES = st.sampled_from([0, 250, None])


class LedgerMachine(RuleBasedStateMachine):
    """Each rule is an event; `CheckedLedger` compares the ledger with what it must say after every one."""

    @initialize(
        limits=st.sampled_from(LIMITS), have=st.lists(st.integers(0, STOP - 1), max_size=3), more=st.integers(1, 14)
    )
    def open(self, limits, have, more):
        self.session = CheckedLedger(limits, have=have, max_tokens=more)

    @rule(
        back=st.integers(0, 5),
        behind=st.lists(IDS, max_size=3),
        ids=st.lists(st.integers(0, OUTSIDE), min_size=1, max_size=7),
        deltas=st.lists(st.integers(1, 4), max_size=7),
        lead=st.integers(0, 5),
        foreign=st.booleans(),
    )
    def anything_is_drafted(self, back, behind, ids, deltas, lead, foreign):
        length = max(0, len(self.session.facts) - back)
        self.session.draft(length, behind, ids, deltas, lead=lead, foreign=foreign)

    @rule(ids=st.lists(IDS, min_size=1, max_size=4), parents=st.lists(st.integers(0, 3), min_size=4, max_size=4))
    def the_next_tokens_are_guessed(self, ids, parents):
        deltas = [min(i + 1, 1 + parents[i]) for i in range(len(ids))] if self.session.limits.trees else ()
        self.session.draft(len(self.session.facts), [], ids, deltas)

    @rule(data=st.data(), id=IDS)
    def a_guess_is_continued(self, data, id):
        self.session.draft(len(self.session.facts), self._guessed(data), [id], lead=1)

    @rule(ids=st.lists(IDS, min_size=1, max_size=4), price=st.sampled_from(PRICES))
    def a_step_draws(self, ids, price):
        self.session.commit(ids, price)

    @rule(data=st.data(), id=IDS, price=st.sampled_from(PRICES))
    def a_step_accepts_guesses(self, data, id, price):
        self.session.commit([*self._guessed(data), id], price)

    @rule(back=st.integers(-1, 6), foreign=st.booleans())
    def the_device_says_what_it_has(self, back, foreign):
        self.session.resync(max(0, len(self.session.facts) - back), foreign=foreign)

    @rule(back=st.integers(0, 5), patience_ms=PATIENCES)
    def the_device_opens_again(self, back, patience_ms):
        self.session.renew(len(self.session.facts) - back, patience_ms)

    @rule(back=st.integers(0, 4), id=IDS)
    def the_device_opens_with_another_text(self, back, id):
        self.session.claims_another(len(self.session.facts) - back, id)

    @rule(seconds=st.sampled_from([0.0, 1 / 64, 0.5, 3.0]))
    def time_passes(self, seconds):
        self.session.wait(seconds)

    @rule()
    def the_cache_is_lost(self):
        self.session.evict()

    @rule()
    def there_is_room_again(self):
        self.session.admit()

    @rule(rows=st.integers(0, 8), draft_rows=st.integers(0, 4), drew=st.booleans())
    def rows_are_charged(self, rows, draft_rows, drew):
        self.session.charge(rows, draft_rows, drew)

    @rule()
    def the_device_drafts_no_more(self):
        self.session.alone()

    def _guessed(self, data) -> list[int]:
        """A path down the tree of guesses, as long as it likes."""
        path, node = [], self.session.ledger.tree.root
        while node.children and data.draw(st.booleans()):
            node = data.draw(st.sampled_from(list(node.children.values())))
            path.append(node.id)
        return path


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
