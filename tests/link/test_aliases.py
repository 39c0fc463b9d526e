"""Topic aliases: short where it pays, and never another topic than the one that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from link.aliases import AliasedTopics, Aliases
from protocol.errors import WireError


def shortened(maximum: int, topics: list[str]) -> int:
    """How many of these go without their topic."""
    aliases = Aliases(maximum)
    return sum(not aliases.shorten(topic)[0] for topic in topics)


@given(st.integers(0, 5), st.lists(st.sampled_from("abcdefghij"), max_size=200))
def test_the_receiver_finds_the_topic_that_was_meant(maximum: int, topics: list[str]) -> None:
    aliases, receiver = Aliases(maximum), AliasedTopics(maximum)
    for topic in topics:
        sent, alias = aliases.shorten(topic)
        assert sent in ("", topic)
        assert receiver.resolve(sent, alias) == topic


def test_a_topic_goes_short_from_its_second_use_on() -> None:
    aliases = Aliases(10)
    assert [aliases.shorten("draft") for _ in range(3)] == [("draft", 1), ("", 1), ("", 1)]


def test_a_broker_that_grants_none_gets_none() -> None:
    assert shortened(0, ["draft"] * 10) == 0


def test_a_new_topic_takes_the_alias_that_rested_longest() -> None:
    """A board's next verifier, after as many as there are aliases."""
    aliases = Aliases(3)
    for topic in "aaaabbbbccccaaaa":
        aliases.shorten(topic)
    assert aliases.shorten("d") == ("d", None)
    assert aliases.shorten("d") == ("d", 2), "b's"
    assert aliases.shorten("d") == ("", 2)
    assert aliases.shorten("a") == ("", 1)


def test_topics_in_turn_do_not_take_the_aliases_from_each_other() -> None:
    """A verifier with twice as many boards as aliases, one commit to each at every step: half must profit."""
    boards = [f"board {number}" for number in range(20)]
    assert shortened(10, boards * 50) == 49 * 10


def test_aliases_go_to_the_topics_that_come_often() -> None:
    topics = []
    for number in range(400):
        topics += ["often 1", "often 2", f"seldom {number % 50}"]
    assert shortened(2, topics) == 2 * 399


def test_what_is_remembered_is_bounded() -> None:
    aliases = Aliases(10)
    for number in range(20_000):
        aliases.shorten(f"topic {number}")
    assert len(aliases._used_at) < 2000


@pytest.mark.parametrize(("topic", "alias"), [("", None), ("", 1), ("a", 0), ("a", 3), ("", 3)])
def test_an_alias_that_means_nothing_is_refused(topic: str, alias: int | None) -> None:
    with pytest.raises(WireError, match="topic alias"):
        AliasedTopics(2).resolve(topic, alias)
