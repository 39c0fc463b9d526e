"""Topics are made and parsed in one place; identities cannot smuggle levels or wildcards in."""

from __future__ import annotations

import pytest

from protocol import topics
from protocol.errors import WireError
from protocol.topics import Topic


@pytest.mark.parametrize(
    ("made", "parsed"),
    [
        (topics.open_topic("acme.pi-1", "smollm2-0123"), Topic("acme.pi-1", "open", "smollm2-0123")),
        (topics.draft_topic("acme.pi-1", "v1"), Topic("acme.pi-1", "draft", "v1")),
        (topics.verdict_topic("acme.pi-1"), Topic("acme.pi-1", "verdict")),
        (topics.device_state_topic("acme.pi-1"), Topic("acme.pi-1", "state")),
        (topics.verifier_state_topic("v1"), Topic("", "verifier", "v1")),
        (topics.update_topic("stable", "model"), Topic("", "update", "stable")),
    ],
)
def test_what_is_made_can_be_parsed(made, parsed):
    assert topics.parse(made) == parsed


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "outrider/v1",
        "outrider/v2/a.b/verdict",
        "outrider/v1/ab/verdict",
        "outrider/v1/a.b.c/verdict",
        "outrider/v1/a.b/open",
        "outrider/v1/a.b/open/x/y",
        "outrider/v1/a.b/open/x.y",
        "outrider/v1/+/open/x",
        "outrider/v1/a.b/verdict/",
        "outrider/v1/a.b/verdict\n",
        "outrider/v1/verifiers/v1.2/state",
        "outrider/v1/updates/stable/firmware",
        "outrider/v1/updates/a.b/model",
        "$share/t/outrider/v1/+/open/t",
    ],
)
def test_other_topics_are_refused(topic):
    with pytest.raises(WireError):
        topics.parse(topic)


@pytest.mark.parametrize("device", ["pi", "a.b.c", "a/b.c", "+.b", "a.#", "", ".b", "a.", "a.b\n", "x" * 65 + ".b"])
def test_identities_that_a_broker_could_misread_are_refused(device):
    with pytest.raises(WireError):
        topics.check_device(device)


def test_verifiers_of_a_target_share_its_opens():
    assert topics.shared_open_filter("t-1") == "$share/t-1/outrider/v1/+/open/t-1"
    assert topics.tenant_of("acme.pi-1") == "acme"
