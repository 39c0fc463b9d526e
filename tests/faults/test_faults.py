"""Each fault once, where it can be quick: no text is lost, doubled or wrong, and none waits long. `make faults` is the
whole of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from link.packets import publish_packet
from tests.faults import hostile, suite
from tests.faults.cable import pull
from tests.faults.fleet import Fleet
from tests.faults.named import Named, Scenario
from tests.faults.reader import Application
from tests.faults.recoverable import BY_NAME, FAULTS
from tests.faults.scramble import Disorder, Scrambler, plain, read_packet
from tests.faults.stories import session_of, undisturbed
from tests.faults.trial import BAR_S, percentile
from tools.broker import find_mosquitto

needs_mosquitto = pytest.mark.skipif(find_mosquitto() is None, reason="no mosquitto")


@needs_mosquitto
def test_a_fleet_recovers_from_every_fault(tmp_path):
    with Fleet(tmp_path, num_boards=suite.QUICK_BOARDS, clocks=suite.CLOCKS, seed=1) as fleet:
        costs = suite.quickly(fleet, print)
        assert fleet.wrong == []
    for name, one in costs.items():
        assert one.beyond_s or BY_NAME[name].absent, name
        assert not one.missed, f"{name}: {one.beyond_s}"


@needs_mosquitto
def test_a_cable_that_is_pulled_costs_no_more_than_the_time_it_is_out(tmp_path):
    costs, wrong, _ = pull(tmp_path, 1, suite.QUICK_PULLS_S)
    if costs.absent:
        pytest.skip(costs.absent)
    assert wrong == [] and not costs.missed, costs.beyond_s


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Iterator[dict[Scenario, Future[Named]]]:
    """All scenarios under way: those with certificates one after the other, the others beside them."""
    with ThreadPoolExecutor(1) as certified, ThreadPoolExecutor(1) as others:
        yield {
            scenario: (certified if scenario.__module__ == hostile.__name__ else others).submit(
                scenario, tmp_path_factory.mktemp(scenario.__name__), 1
            )
            for scenario in suite.NAMED
        }


@needs_mosquitto
@pytest.mark.parametrize("scenario", suite.NAMED, ids=lambda scenario: scenario.__name__)
def test_what_a_fleet_cannot_mend_is_named(scenario, scenes):
    found = scenes[scenario].result()
    if found.absent:
        pytest.skip(found.absent)
    assert found.error and found.wrong == []


# -- what would otherwise see nothing ---------------------------------------------------------------------------------


def line(**what):
    return {"at": 1.0, "wall": 0.0, "owner": "v", "session": session_of("a.b", 1), **what}


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([(0, 4), (5, 9)], "lost at 4"),
        ([(0, 4), (3, 9)], "doubled at 4"),
        ([(0, 4), "wrong"], "differs within 4..5"),
        ([(0, 4), "finished"], "ended after 4 of 12"),
        ([(0, 4), "resumed at 2"], "the journal has 2 tokens, the application had 4"),
    ],
)
def test_a_text_that_is_not_the_targets_is_found(lines, complaint):
    whole = undisturbed("a.b", 1, 12)
    application = Application("a.b", max_tokens=12)
    for one in lines:
        match one:
            case "wrong":
                application.take(line(base=4, ids=[whole[4] + 1]))
            case "finished":
                application.take(line(finished=4))
            case "resumed at 2":
                application.take(line(resumed=list(whole[:2])))
            case (begin, end):
                application.take(line(base=begin, ids=list(whole[begin:end])))
    assert complaint in " ".join(application.wrong)


def test_a_text_as_it_should_be_is_not_complained_of():
    whole = list(undisturbed("a.b", 1, 12))
    application = Application("a.b", max_tokens=12)
    for one in (line(base=0, ids=whole[:5]), line(resumed=whole[:7]), line(base=7, ids=whole[7:]), line(finished=12)):
        application.take(one)
    assert (application.wrong, application.finished) == ([], 1)


def test_the_longest_silence_is_measured_from_the_token_before():
    application = Application("a.b")
    application.times = [1.0, 2.0, 2.5, 7.0, 7.1]
    assert application.silent_s(3.0, 7.0) == 4.5
    assert application.next_after(2.6) == 7.0 and application.next_after(8.0) is None


def test_a_scrambler_doubles_and_reorders_messages_and_resolves_their_aliases():
    async def play() -> list[int]:
        got: list[int] = []

        async def far_end(reader, writer):
            aliases: dict[int, str] = {}
            while len(got) < 60:
                packet = await read_packet(reader)
                assert plain(packet, aliases) == packet and b"a/topic" in packet
                got.append(packet[-1])

        server = await asyncio.start_server(far_end, "127.0.0.1", 0)
        scrambler = Scrambler(server.sockets[0].getsockname())
        await scrambler.start()
        scrambler.disorder = Disorder(late_s=0.05, doubles=1.0)
        _, writer = await asyncio.open_connection("127.0.0.1", scrambler.port)
        writer.write(publish_packet("a/topic", b"\0", alias=3))
        for number in range(1, 30):
            writer.write(publish_packet("", bytes((number,)), alias=3))
        deadline = asyncio.get_running_loop().time() + 5
        while len(got) < 60:
            assert asyncio.get_running_loop().time() < deadline, got
            await asyncio.sleep(0.01)
        await scrambler.stop()
        server.close()
        return got

    got = asyncio.run(play())
    assert sorted(got) == sorted([*range(30), *range(30)]) and got != sorted(got)


def test_the_bar_is_for_the_slowest_but_one_in_twenty():
    assert percentile([1.0] * 19 + [9.0], 0.95) == 1.0
    assert percentile([1.0] * 9 + [9.0], 0.95) == 9.0 > BAR_S
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
