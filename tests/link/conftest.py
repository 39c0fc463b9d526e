"""A broker, and links to it that are closed after the test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from link.config import BrokerConfig
from tests.link.ends import End, Make
from tools.broker import Broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker.start() as running:
        yield running


@pytest.fixture
def end() -> Iterator[Make]:
    ends: list[End] = []

    def make(port: int, name: str, up: bool = True, **options: Any) -> End:
        settings = options.pop("config", {})
        config = BrokerConfig(**{"port": port, "backoff_max_s": 0.2, "connect_timeout_s": 2.0} | settings)
        ends.append(End(config, f"{name}-{time.monotonic_ns()}", **options))
        if up:
            ends[-1].link.wait_up(5.0)
        return ends[-1]

    yield make
    for one in ends:
        one.link.close(0.0)
