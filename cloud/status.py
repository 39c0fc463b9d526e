"""`outrider-cloud status`: what the broker knows of its verifiers, and what these say of themselves."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from link.config import BrokerConfig
from link.retained import read_retained
from protocol import topics
from protocol.errors import LinkError
from protocol.messages import VerifierState

WATCH_S = 2.0
ANSWER_S = 5.0

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class Live:
    """A verifier's figures over a moment. tokens_per_s: committed; occupancy: sessions a step; acceptance: of the draft
    rows, those that were right; kv_used: share of the budget that open sessions hold; queue_ms: how long root rows had
    been due, step_ms: a step, mean. None where nothing happened that would show it.
    """

    tokens_per_s: float
    sessions: int
    occupancy: float | None
    acceptance: float | None
    step_ms: float | None
    queue_ms: float | None
    knee_rows: int
    kv_used: float
    evictions: int
    errors: int


def read_states(broker: BrokerConfig) -> list[VerifierState]:
    """The retained states of all verifiers at a broker. Raises LinkError when it cannot be reached."""
    states = read_retained(broker, topics.verifier_state_topic("+"), VerifierState, broker.connect_timeout_s)
    return sorted(states.values(), key=lambda state: (state.target, state.verifier))


def read_live(
    urls: Sequence[str], sleep: Callable[[float], None] = time.sleep
) -> tuple[dict[str, Live], list[LinkError]]:
    """Figures by verifier, from the endpoints at `urls`, e.g. "http://10.0.0.7:9178", and why some gave none."""
    before: dict[str, Figures] = {}
    found: dict[str, Live] = {}
    failed: list[LinkError] = []
    started = time.monotonic()
    for url in urls:
        try:
            before[url] = scrape(url)
        except LinkError as error:
            failed.append(error)
    if before:
        sleep(WATCH_S)
    for url, first in before.items():
        try:
            after = scrape(url)
        except LinkError as error:
            failed.append(error)
        else:
            found[name_of(after, url)] = live(first, after, time.monotonic() - started)
    return found, failed


def scrape(url: str) -> Figures:
    """What `/metrics` says. Raises LinkError."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        remedy = "Name a verifier's `[http] host` and `port`, e.g. http://127.0.0.1:9178."
        raise LinkError(f"no metrics: {reason}", where=url, remedy=remedy) from None
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def name_of(figures: Figures, url: str) -> str:
    """The verifier's name; `url` while it has none, since its engine is being loaded."""
    return next((dict(labels)["verifier"] for name, labels in figures if name == "outrider_verifier_info"), url)


def live(before: Figures, after: Figures, seconds: float) -> Live:
    """What happened between two looks, `seconds` apart."""

    def total(figures: Figures, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(value for (of, given), value in figures.items() if of == name and wanted <= dict(given).items())

    def now(name: str, **labels: str) -> float:
        return total(after, name, **labels)

    def rise(name: str, **labels: str) -> float:
        return now(name, **labels) - total(before, name, **labels)

    def ratio(over: float, under: float, scale: float = 1.0) -> float | None:
        return scale * over / under if under else None

    blocks = now("outrider_kv_blocks")
    return Live(
        tokens_per_s=rise("outrider_committed_tokens_total") / seconds,
        sessions=int(now("outrider_sessions")),
        occupancy=ratio(rise("outrider_step_sessions_sum"), rise("outrider_step_sessions_count")),
        acceptance=ratio(rise("outrider_accepted_tokens_total"), rise("outrider_rows_total", kind="draft")),
        step_ms=ratio(rise("outrider_step_seconds_sum"), rise("outrider_step_seconds_count"), 1000),
        queue_ms=ratio(rise("outrider_queue_seconds_sum"), rise("outrider_queue_seconds_count"), 1000),
        knee_rows=int(now("outrider_knee_rows")),
        kv_used=now("outrider_kv_blocks", state="used") / blocks if blocks else 0.0,
        evictions=int(now("outrider_evictions_total")),
        errors=int(now("outrider_errors_total")),
    )


def as_dicts(states: Sequence[VerifierState], found: dict[str, Live]) -> list[dict[str, Any]]:
    """What `--json` prints, a line each: what the broker knows, and under `live` what was measured, if it was."""
    known = {state.verifier: {name: getattr(state, name) for name in state.__struct_fields__} for state in states}
    for name, figures in found.items():
        known.setdefault(name, {"verifier": name, "status": "unknown to the broker"})["live"] = asdict(figures)
    return list(known.values())


def tables(states: Sequence[VerifierState], found: dict[str, Live]) -> list[Table]:
    """The same for a person, in two tables of which each fits a narrow terminal."""
    known = Table("verifier", "status", "target", "numerics", "sessions", "step ms")
    for state in states:
        cells = (state.verifier, state.status, state.target, state.numerics, str(state.sessions))
        known.add_row(*cells, f"{state.step_us / 1000:.1f}")
    if not found:
        return [known]
    measured = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    measured.add_column("verifier", no_wrap=True)
    for name in ("tok/s", "a step", "accept", "step ms", "queue", "knee", "KV", "evict", "err"):
        measured.add_column(name, justify="right", no_wrap=True)
    for name, live in sorted(found.items()):
        measured.add_row(
            *(name, _number(live.tokens_per_s, 1), _number(live.occupancy, 1)),
            *(_number(live.acceptance, 2), _number(live.step_ms, 1), _number(live.queue_ms, 1), str(live.knee_rows)),
            *(f"{live.kv_used:.0%}", str(live.evictions), str(live.errors)),
        )
    return [known, measured] if states else [measured]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
