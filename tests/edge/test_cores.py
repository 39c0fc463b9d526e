"""Which cores a board's process runs on."""

from __future__ import annotations

import os
import threading

import pytest

from edge.config import BoardConfig
from edge.cores import big_cores, choose_cores, pin
from protocol.errors import ConfigError
from tests.edge.boardfiles import BoardFiles

EIGHT = frozenset(range(8))


def test_of_an_rk3588_the_four_big_cores(tmp_path):
    BoardFiles(tmp_path).cores(*[530] * 4, *[1024] * 4)
    assert big_cores(EIGHT, tmp_path) == {4, 5, 6, 7}
    assert choose_cores(BoardConfig(cores="big"), EIGHT, tmp_path) == {4, 5, 6, 7}
    assert choose_cores(BoardConfig(), EIGHT, tmp_path) == EIGHT


def test_frequency_tells_where_capacity_is_not_there(tmp_path):
    BoardFiles(tmp_path).cores(1_800_000, 1_800_000, 2_400_000, 2_400_000, file="cpufreq/cpuinfo_max_freq")
    assert big_cores(frozenset(range(4)), tmp_path) == {2, 3}


def test_cores_that_are_alike_are_all_big(tmp_path):
    BoardFiles(tmp_path).cores(1024, 1024, 1024, 1024)
    assert big_cores(frozenset(range(4)), tmp_path) == {0, 1, 2, 3}
    assert big_cores(EIGHT, tmp_path / "nothing") == EIGHT


def test_a_big_core_that_is_not_ours_is_left_alone(tmp_path):
    BoardFiles(tmp_path).cores(530, 530, 1024, 1024)
    assert big_cores(frozenset({0, 1, 3}), tmp_path) == {3}


def test_a_core_that_is_not_there_is_named():
    assert choose_cores(BoardConfig(cores=(1, 2)), EIGHT) == {1, 2}
    with pytest.raises(ConfigError, match=r"no core 9.*0-2,5"):
        choose_cores(BoardConfig(cores=(0, 9)), frozenset({0, 1, 2, 5}))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins a thread to cores")
def test_what_is_started_after_pinning_stays_on_those_cores():
    mine = os.sched_getaffinity(0)
    one = min(mine)
    seen: list[set[int]] = []

    def work() -> None:  # in a thread of its own, so that the tests after this one keep their cores
        assert pin(BoardConfig(cores=(one,))) == 1
        child = threading.Thread(target=lambda: seen.append(set(os.sched_getaffinity(0))))
        child.start()
        child.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{one}] and os.sched_getaffinity(0) == mine
