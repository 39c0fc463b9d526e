"""Which target a board's sessions go to."""

from __future__ import annotations

import pytest

from edge.targets import choose_target
from protocol.errors import ConfigError, LinkError, ModelError
from protocol.messages import VerifierState

OURS, OTHER = "1" * 64, "2" * 64


def state(verifier: str, target: str = "t1", *, status: str = "up", digest: str = OURS) -> VerifierState:
    return VerifierState(verifier, status, target, tokenizer_digest=digest)


def choose(states, wanted=None):
    return choose_target(states, tokenizer_digest=OURS, wanted=wanted, where="broker:1883")


def test_the_only_target_that_reads_our_tokens_is_taken():
    states = [state("a", "t2", digest=OTHER), state("b", "t1"), state("c", "t1")]
    assert choose(states).target == "t1"


def test_a_named_target_is_taken_among_several():
    states = [state("a", "t1"), state("b", "t2")]
    assert choose(states, "t2").verifier == "b"


def test_several_that_fit_must_be_named():
    with pytest.raises(ConfigError, match=r"t1, t2.*`target` in \[session\]"):
        choose([state("a", "t2"), state("b", "t1")])


@pytest.mark.parametrize("wanted", [None, "t1"])
def test_another_tokenizer_is_refused_by_both_digests(wanted):
    with pytest.raises(ModelError, match=r"111111111111.*222222222222.*t1"):
        choose([state("a", digest=OTHER)], wanted)


@pytest.mark.parametrize("states", [[], [state("a", status="gone")], [state("a", status="draining")]])
def test_nobody_up_is_said_with_the_broker_and_what_to_do(states):
    with pytest.raises(LinkError, match=r"broker:1883.*outrider-cloud serve"):
        choose(states)
    with pytest.raises(LinkError, match="t1"):
        choose(states, "t1")


def test_a_will_names_no_target_and_is_no_candidate():
    with pytest.raises(LinkError):
        choose([VerifierState("a", "up")])
