"""What is done about replicas that start, hang, die, leave and are replaced, on a scripted clock."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from cloud.autoscale import Load
from cloud.config import ReplicasConfig
from cloud.fleet import FRUITLESS, PAUSE_MOST_S, PLACE_S, Fleet, Kill, Order, Retire, Start, Stop, Tell
from link.backoff import Backoff
from protocol.errors import ConfigError, ModelError, OutriderError


class Script:
    """A fleet, its clock, and replicas that serve as soon as they are told to."""

    def __init__(self, **config: float) -> None:
        names = count(1)
        self.fleet = Fleet(
            ReplicasConfig(**{"hang_s": 1000.0, **config}),  # type: ignore[arg-type]
            backoff=Backoff(PAUSE_MOST_S, seed=1),
            name=lambda: f"v{next(names)}",
        )
        self.now = 100.0
        self.orders: list[Order] = []

    def turn(self, seconds: float = 0.0) -> list[Order]:
        self.now += seconds
        orders = self.fleet.orders(self.now)
        self.orders += orders
        for order in orders:
            if isinstance(order, Kill):
                self.fleet.ended(order.id, self.now)
        return orders

    def serve(self, *ids: str, sessions: int = 0, queue_s: float = 0.1) -> None:
        for id in ids or list(self.fleet.members):
            self.fleet.heard(id, Load(True, sessions, queue_s), self.now)

    def up(self) -> list[str]:
        """All of them, serving."""
        self.turn()
        self.serve()
        return sorted(self.fleet.members)

    def started(self) -> list[str]:
        return [order.member.id for order in self.orders if isinstance(order, Start)]


def test_it_starts_as_many_as_are_wanted_once():
    script = Script(least=3)
    assert len(script.turn()) == 3 and not script.turn(1.0)
    assert script.started() == ["v1", "v2", "v3"]
    assert [member.slot for member in script.fleet.members.values()] == [0, 1, 2]


def test_one_that_dies_is_followed_by_another_in_its_slot():
    script = Script(least=2)
    script.up()
    script.turn(60.0)
    script.serve()
    script.fleet.ended("v1", script.now)
    script.turn(0.6)
    assert script.started() == ["v1", "v2", "v3"] and script.fleet.members["v3"].slot == 0


def test_who_dies_at_once_again_and_again_is_waited_for_longer_and_longer():
    script = Script(least=2)
    script.turn()
    script.serve("v1")
    script.fleet.ended("v2", script.now)
    starts: list[float] = []
    while len(starts) < 9:
        if any(isinstance(order, Start) for order in script.turn(0.1)):
            starts.append(script.now)
            script.serve("v1")
            script.fleet.ended(script.started()[-1], script.now)
        script.serve("v1")
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses[0] < 1.1 and pauses[-1] > 20 and max(pauses) <= PAUSE_MOST_S + 0.2


@pytest.mark.parametrize("error", [ConfigError("no"), ModelError("no")])
def test_a_configuration_that_no_replica_can_serve_ends_the_fleet(error):
    script = Script(least=2)
    script.turn()
    script.fleet.ended("v1", script.now, error)
    assert script.turn() == [Kill("v2", "it has not begun to serve")]
    assert script.fleet.failure is error and script.fleet.over and not script.turn(1000.0)


def test_a_machine_without_the_model_does_not_end_those_that_serve():
    script = Script(least=2)
    script.turn()
    script.serve("v1")
    script.fleet.ended("v2", script.now, ModelError("no such file"))
    assert script.fleet.failure is None
    script.turn(PAUSE_MOST_S - 1)
    assert script.started() == ["v1", "v2"]
    script.serve("v1")
    script.turn(2.0)
    assert script.started() == ["v1", "v2", "v3"]


def test_a_pause_for_one_place_is_no_pause_for_another():
    script = Script(least=2)
    script.turn()
    script.serve("v1")
    script.fleet.ended("v2", script.now, ModelError("no such file"))
    script.turn(10.0)
    script.fleet.ended("v1", script.now)
    script.turn(1.0)
    assert script.started() == ["v1", "v2", "v3"]


def test_deaths_without_a_reason_are_not_tried_for_ever():
    script = Script(least=1)
    for _ in range(1000):
        script.turn(1.0)
        for id in list(script.fleet.members):
            script.fleet.ended(id, script.now)
    assert isinstance(script.fleet.failure, OutriderError) and len(script.started()) == FRUITLESS


def test_who_gives_no_sign_of_life_is_ended():
    script = Script(least=2, hang_s=5.0)
    script.up()
    script.now += 4.0
    script.serve("v1")
    assert not script.turn()
    assert script.turn(1.5)[0] == Kill("v2", "it has given no sign of life for 5 s")
    script.turn(1.0)
    assert "v3" in script.fleet.members


def test_a_loop_that_stands_still_is_no_sign_of_life():
    script = Script(least=1, hang_s=5.0)
    script.up()
    for second in range(5):
        script.now += 1.0
        script.fleet.heard("v1", Load(True, 1, 0.1, silence_s=second + 1.0), script.now)
    assert any(isinstance(order, Kill) for order in script.turn())


def test_who_does_not_come_up_is_ended_but_not_who_waits_for_a_place():
    script = Script(least=2, start_s=60.0)
    script.turn()
    script.fleet.heard("v1", Load(), script.now)
    told = script.turn(PLACE_S)
    assert len(told) == 1 and isinstance(told[0], Tell) and "v2" in told[0].what
    ended = [order.id for _ in range(100) for order in script.turn(1.0) if isinstance(order, Kill)]
    assert ended == ["v1"]


def test_all_leave_the_share_before_any_drains():
    script = Script(least=3)
    up = script.up()
    script.fleet.close(script.now)
    assert script.turn() == [*map(Retire, up), *map(Stop, up)]
    assert not script.fleet.over
    for id in up:
        script.fleet.ended(id, script.now)
    assert script.fleet.over and script.fleet.failure is None


def test_who_does_not_leave_in_time_is_ended():
    script = Script(least=1, drain_s=5.0)
    script.up()
    script.fleet.close(script.now)
    script.turn()
    assert not script.turn(4.0)
    assert isinstance(script.turn(1.5)[0], Kill) and script.fleet.over


def test_fewer_are_wanted_and_the_emptiest_leaves():
    script = Script(least=1, most=3, settle_s=10.0)
    for _ in range(40):
        script.serve(sessions=1, queue_s=0.5)
        script.turn(1.0)
    assert sorted(script.fleet.members) == ["v1", "v2", "v3"]
    orders: list[Order] = []
    for _ in range(15):
        script.serve("v1", "v3", sessions=4, queue_s=0.0)
        script.serve("v2", sessions=1, queue_s=0.0)
        orders += script.turn(1.0)
        if orders:
            break
    assert orders == [Retire("v2"), Stop("v2")]
    script.fleet.ended("v2", script.now)
    assert not script.turn(1.0) and sorted(script.fleet.members) == ["v1", "v3"]


def test_a_lost_broker_is_no_reason_to_shrink():
    script = Script(least=1, most=3, settle_s=10.0)
    for _ in range(40):
        script.serve(sessions=1, queue_s=0.5)
        script.turn(1.0)
    for _ in range(40):
        for id in script.fleet.members:
            script.fleet.heard(id, Load(), script.now)
        assert not script.turn(1.0)


def test_a_new_configuration_replaces_all_and_never_fewer_serve():
    script = Script(least=2)
    script.up()
    script.fleet.renew(ReplicasConfig(least=2))
    for _ in range(20):
        for order in script.turn(1.0):
            if isinstance(order, Stop):
                assert sum(member.served is not None for member in script.fleet.members.values()) > 2
                script.fleet.ended(order.id, script.now)
        script.serve()
        assert sum(member.serves for member in script.fleet.members.values()) >= 2
    assert sorted(script.fleet.members) == ["v3", "v4"]
    assert {member.generation for member in script.fleet.members.values()} == {1}
