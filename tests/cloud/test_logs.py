"""Logs: fields for machines, calm for people."""

from __future__ import annotations

import io
import json
import logging

import pytest

from cloud.logs import Calm, JsonFormatter, LogObserver, TextFormatter
from tests.cloud.ledgers import make_ledger


class Stage:
    """A logger of its own whose lines and clock a test holds."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter)
        handler.addFilter(Calm(lambda: self.now))
        self.handler = handler

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def stage(monkeypatch):
    made = Stage(JsonFormatter())
    logger = logging.getLogger("cloud.logs")
    monkeypatch.setattr(logger, "handlers", [made.handler])
    monkeypatch.setattr(logger, "propagate", False)
    logger.setLevel(logging.INFO)
    yield made
    logger.setLevel(logging.NOTSET)


def test_a_refusal_is_one_line_with_fields(stage):
    LogObserver().refused("acme.kitchen", "over-limit", "acme.kitchen has 8 sessions open already", 0x1F)
    (line,) = map(json.loads, stage.lines)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "cloud.logs",
        "message": "refused: acme.kitchen has 8 sessions open already",
        "tenant": "acme",
        "device": "acme.kitchen",
        "session": "000000000000001f",
        "code": "over-limit",
    }


def test_a_flood_of_one_kind_is_told_once_and_then_counted(stage):
    observer = LogObserver()
    for i in range(500):
        observer.refused(f"evil.{i % 7}", "bad-message", f"nonsense {i}", i)
    observer.refused("evil.1", "diverged", "another code is another kind")
    observer.refused("acme.a", "bad-message", "and so is another tenant")
    assert len(stage.lines) == 3
    stage.now = 60.0
    observer.refused("evil.1", "bad-message", "again")
    last = json.loads(stage.lines[-1])
    assert last["message"] == "refused: again" and last["repeated"] == 499


def test_a_storm_of_evictions_is_told_of_and_a_few_are_not(stage):
    now = 0.0
    observer = LogObserver(lambda: now)
    for i in range(60):
        now += 2.0
        observer.evicted(make_ledger(i))
    assert not stage.lines
    for i in range(45):
        now += 0.1
        observer.evicted(make_ledger(i))
    (line,) = map(json.loads, stage.lines)
    assert line["tenant"] == "acme" and "kv_gib" in line["message"]


def test_an_exception_is_one_json_line(stage):
    for _ in range(3):
        try:
            raise RuntimeError("the accelerator has left the bus")
        except RuntimeError:
            logging.getLogger("cloud.logs").exception("a step of %d sessions failed", 3)
    (line,) = map(json.loads, stage.lines)
    assert (
        line["level"] == "error" and "left the bus" in line["exception"] and line["message"].startswith("a step of 3")
    )


def test_news_is_not_held_back(stage):
    for i in range(5):
        logging.getLogger("cloud.logs").info("step %d", i)
    assert len(stage.lines) == 5


def test_a_person_reads_the_same_as_text(stage):
    stage.handler.setFormatter(TextFormatter())
    LogObserver().refused("acme.a", "no-room", "all 64 sessions are taken")
    assert stage.lines == [
        "WARNING cloud.logs: refused: all 64 sessions are taken [tenant=acme device=acme.a code=no-room]"
    ]
