"""A window among owners, liars and a link that comes and goes; then with real verifiers over a channel that does its
worst and gets well again. Whatever happens, the text is the owner's, and in the end all of it.
"""

from __future__ import annotations

from math import inf

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.fuzz.ends import STEP_S, Ends
from tests.fuzz.ends import VOCAB as ENDS_VOCAB
from tests.fuzz.window import CODES, LIMITS, OTHER_SESSION, PROMPT, SESSION, VERIFIERS, VOCAB, CheckedWindow

SETTINGS = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
LATE = st.sampled_from([0, 0, 0, 1, 2, -1])
PLACES = st.integers(0, 15)
CHANCES = st.sampled_from([0.9, 0.5, 0.0])


class WindowMachine(RuleBasedStateMachine):
    """Each rule is an event; `CheckedWindow` compares the window with what it must say after every one."""

    @initialize(have=st.integers(0, 3), former=st.sampled_from(["", VERIFIERS[0]]))
    def ask_for_a_text(self, have, former):
        self.session = CheckedWindow(have, former=former)
        self.session.tick(0.0)

    @rule(verifier=st.integers(0, 1), handle=st.integers(0, 1), limits=st.integers(0, len(LIMITS) - 1))
    def a_verifier_takes_it(self, verifier, handle, limits):
        self.session.opened(verifier, handle=handle, length=self.session.frontier, limits=limits)

    @rule(
        verifier=st.integers(0, 1),
        late=LATE,
        handle=st.integers(0, 1),
        length=st.integers(len(PROMPT), 12),
        session=st.sampled_from([SESSION, OTHER_SESSION]),
    )
    def any_answer_to_an_open_comes(self, verifier, late, handle, length, session):
        self.session.opened(verifier, late, handle=handle, length=length, session=session)

    @rule(back=st.integers(0, 4), more=st.integers(0, 4), seq=st.integers(0, 3), held=st.integers(0, 8))
    def the_owner_commits(self, back, more, seq, held):
        seq = (self.session.window._seq - seq) % 256
        handle = max(0, self.session.window._handle)
        base = max(len(PROMPT), self.session.frontier - back)
        self.session.commit(base, self.session.frontier - base + more, handle=handle, seq=seq, held=held)

    @rule(
        ahead=st.integers(-4, 3),
        num_ids=st.integers(0, 5),
        verifier=st.sampled_from([None, 0, 1]),
        late=LATE,
        handle=st.integers(0, 1),
        wrong_hash=st.booleans(),
        contradicts=st.booleans(),
        outside=st.booleans(),
    )
    def anything_is_committed(self, ahead, num_ids, **how):
        self.session.commit(max(0, self.session.frontier + ahead), num_ids, **how)

    @rule(
        code=st.integers(0, len(CODES) - 1),
        late=LATE,
        by_handle=st.booleans(),
        retry_ms=st.sampled_from([None, 0, 500, 60_000]),
    )
    def an_error_comes(self, code, late, by_handle, retry_ms):
        self.session.error(code, late, by_handle=by_handle, retry_ms=retry_ms)

    @rule(verifier=st.integers(0, 1), status=st.sampled_from(["up", "draining", "gone"]))
    def a_verifier_tells_its_state(self, verifier, status):
        self.session.state(verifier, status)

    @rule(up=st.booleans())
    def the_link_changes(self, up):
        self.session.link(up)

    @rule()
    def nobody_serves_the_target(self):
        self.session.unserved()

    @rule(seconds=st.sampled_from([0.0, 1 / 64, 0.25, 0.5, 1.0, 4.0, 8.0]))
    def time_passes(self, seconds):
        self.session.tick(seconds)

    @rule(
        guesses=st.lists(st.tuples(PLACES, st.integers(0, VOCAB - 1), CHANCES), min_size=1, max_size=5),
        sends=st.booleans(),
    )
    def the_board_guesses(self, guesses, sends):
        for guess in guesses:
            self.session.guess(*guess)
        if sends:
            self.session.flush()

    @rule()
    def guesses_are_sent(self):
        self.session.flush()

    @rule()
    def the_drafter_gives_up(self):
        self.session.stop("give up")

    def teardown(self):
        if hasattr(self, "session"):
            self.session.settle()


class EndsMachine(RuleBasedStateMachine):
    """One session and two verifiers; at the end of every story the channel is good, and the whole text must come."""

    @initialize(
        max_tokens=st.integers(1, 10),
        patience_s=st.sampled_from([0.0, 0.25, inf]),
        have=st.integers(0, 3),
        ahead=st.sampled_from([1, 4, 64]),
    )
    def open(self, **how):
        self.ends = Ends(**how)
        self.ends.wait(0.0)

    @rule()
    def the_oldest_message_arrives(self):
        self.ends.deliver(0)

    @rule(place=PLACES)
    def a_message_overtakes(self, place):
        self.ends.deliver(place)

    @rule(place=PLACES)
    def a_message_arrives_and_will_again(self, place):
        self.ends.deliver(place, keep=True)

    @rule(place=PLACES)
    def a_message_is_lost(self, place):
        self.ends.lose(place)

    @rule(place=st.integers(0, 1), losing=st.booleans(), seconds=st.sampled_from([STEP_S, 20.0]))
    def a_verifier_steps(self, place, losing, seconds):
        self.ends.step(place, losing=losing, seconds=seconds)

    @rule()
    def the_application_asks_for_another_text(self):
        self.ends.another()

    @rule(right=st.lists(st.booleans(), min_size=1, max_size=4))
    def the_board_drafts(self, right):
        self.ends.draft(right)

    @rule(id=st.integers(0, ENDS_VOCAB - 2))
    def the_board_guesses_a_sibling(self, id):
        self.ends.sibling(id)

    @rule(seconds=st.sampled_from([1 / 64, 0.25, 0.5, 1.0, 2.0, 6.0]))
    def time_passes(self, seconds):
        self.ends.wait(seconds)

    @rule(place=st.integers(0, 1), told=st.booleans())
    def a_verifier_dies(self, place, told):
        self.ends.kill_verifier(place, told=told)

    @rule(place=st.integers(0, 1))
    def a_verifier_drains(self, place):
        self.ends.drain(place)

    @rule(up=st.booleans())
    def the_link_changes(self, up):
        self.ends.link(up)

    def teardown(self):
        if hasattr(self, "ends"):
            self.ends.settle()


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = SETTINGS
TestEndsMachine = EndsMachine.TestCase
TestEndsMachine.settings = SETTINGS
