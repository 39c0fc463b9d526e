"""What a verifier does, in numbers for Prometheus (docs/operating.md has the table).

Counters are fed on the verifier's thread, at each step and about every second; a scrape reads them on another. Only the
tenants that the configuration names have a label of their own: strangers must not make up new series.
"""

from __future__ import annotations

import time
from collections import Counter as Sums
from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from cloud.cost import StepCost
from cloud.engines.base import Outcome
from cloud.gateway import Gateway
from cloud.ledger import Ledger
from cloud.meter import Meter
from cloud.scheduler import Step
from cloud.usage import Observer, Usage
from link.counters import Counters
from link.several import Links
from protocol.messages import ErrorCode
from protocol.topics import tenant_of

OTHER = "other"
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KNEE = 2.0
USAGE = tuple(field.name for field in fields(Usage))
CODES = tuple(code for name, code in vars(ErrorCode).items() if name.isupper() and isinstance(code, str))
ROW_KINDS = ("root", "draft", "prefill", "rebuilt")
BLOCK_STATES = ("used", "retained", "empty")
EVENTS = ("sent", "received", "acknowledged", "dropped", "expired", "refused")


def knee(cost: StepCost, most: int) -> int:
    """The most rows of which a step takes at most twice as long as of one row; 0 while nothing is known."""
    alone_s = cost.seconds(1)
    if not alone_s:
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost.seconds(middle) <= KNEE * alone_s else (low, middle - 1)
    return low


class Metrics(Observer):
    """One registry of one verifier. tenants: those that have a label of their own."""

    def __init__(self, tenants: Collection[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self._tenants = frozenset(tenants)
        self._gateway: Gateway | None = None
        self._meter: Meter | None = None
        self._told: dict[int, tuple[Ledger, Usage]] = {}
        self._closed: list[tuple[Ledger, Usage]] = []
        self._tally: Sums[str] = Sums()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider_{name}", text, buckets=buckets, registry=registry)

        self._committed = counter("committed_tokens", "Tokens committed", "tenant")
        self._accepted = counter("accepted_tokens", "Tokens committed that had been guessed", "tenant")
        self._rows = counter("rows", "Rows evaluated; prefill is without rebuilt", "tenant", "kind")
        self._engine_s = counter("engine_seconds", "Engine time, shared by rows", "tenant")
        self._bytes = counter("payload_bytes", "Payloads of sessions", "tenant", "direction")
        self._opened = counter("sessions_opened", "Sessions admitted", "tenant")
        self._errors = counter("errors", "Errors sent, and messages dropped, by code", "tenant", "code")
        self._evictions = counter("evictions", "Sessions whose KV was taken away", "tenant")
        self._grafted = counter("grafted_tokens", "Guesses taken into a session's tree")
        self._stale = counter("stale_tokens", "Guesses dropped before any compute: late, or beside the text")
        self._meter_errors = counter("meter_errors", "Batches that the meter could not write")
        self._meter_lost = counter("meter_lost_lines", "Lines that the meter gave up")
        self._step_s = histogram("step_seconds", "Engine time of a step", SECONDS)
        self._step_rows = histogram("step_rows", "Rows of a step", ROWS)
        self._step_sessions = histogram("step_sessions", "Sessions of a step", ROWS)
        self._queue_s = histogram("queue_seconds", "Mean time for which sessions waited for a step", SECONDS)
        self._sessions = gauge("sessions", "Sessions open", "tenant")
        self._knee = gauge("knee_rows", "Most rows of which a step takes at most twice as long as of one")
        self._blocks = gauge("kv_blocks", "KV blocks: of open sessions, retained for texts to come, empty", "state")
        self._draining = gauge("draining", "1 while sessions are sent elsewhere")
        gauge("link_up", "1 while the broker has accepted the verifier; of several, the share that has").set_function(
            self._link_up
        )
        gauge("loop_age_seconds", "Since the verifier's loop last turned").set_function(self._loop_age_s)
        self._info = Info("outrider_verifier", "Which verifier this is", registry=registry)
        for tenant in (*self._tenants, OTHER):  # a series that begins at 0 shows its first rise
            self._charge(tenant, Sums())
            self._opened.labels(tenant)
            self._evictions.labels(tenant)
            self._sessions.labels(tenant)
            for code in CODES:
                self._errors.labels(tenant, code)
        for state in BLOCK_STATES:
            self._blocks.labels(state)
        registry.register(LinkCollector(self))
        ProcessCollector(registry=registry)

    def watch(self, gateway: Gateway, meter: Meter | None = None) -> None:
        """The gateway whose verifier this observes, once it is made."""
        self._gateway, self._meter = gateway, meter
        state = gateway.verifier.state("up")
        names = ("verifier", "target", "model", "numerics", "version")
        self._info.info({name: str(getattr(state, name)) for name in names})

    def link_counters(self) -> Counters:
        return self._gateway.link.counters() if self._gateway else Counters()

    # -- what it hears --------------------------------------------------------------------------------------------

    def opened(self, ledger: Ledger) -> None:
        self._opened.labels(self._tenant(ledger.device)).inc()

    def refused(self, device: str, code: str, what: str = "", session: int = 0) -> None:
        self._errors.labels(self._tenant(device), code).inc()

    def stepped(self, step: Step, outcome: Outcome, queue_s: float) -> None:
        if outcome.rows:
            self._step_s.observe(outcome.seconds)
            self._step_rows.observe(outcome.rows)
            self._step_sessions.observe(len(step.work))
        if outcome.accepted:
            self._queue_s.observe(queue_s)

    def evicted(self, ledger: Ledger) -> None:
        self._evictions.labels(self._tenant(ledger.device)).inc()

    def closed(self, ledger: Ledger) -> None:
        _, told = self._told.pop(ledger.key, (ledger, Usage()))
        self._closed.append((ledger, told))  # its last messages are still to be sent, and counted

    def flush(self, ledgers: Collection[Ledger], now: float) -> None:
        sums: dict[str, Sums[str]] = {}
        open_by_tenant = Sums(dict.fromkeys((*self._tenants, OTHER), 0))
        for ledger in ledgers:
            open_by_tenant[self._tenant(ledger.device)] += 1
            _, told = self._told.get(ledger.key, (ledger, Usage()))
            if ledger.usage != told:
                self._add(sums, ledger, told)
                self._told[ledger.key] = ledger, replace(ledger.usage)
        for ledger, told in self._closed:
            self._add(sums, ledger, told)
        self._closed.clear()
        for tenant, more in sums.items():
            self._charge(tenant, more)
        for tenant, number in open_by_tenant.items():
            self._sessions.labels(tenant).set(number)
        if self._gateway is not None:
            self._look_at(self._gateway)

    def close(self) -> None:
        self.flush((), 0.0)

    # -- details --------------------------------------------------------------------------------------------------

    def _tenant(self, device: str) -> str:
        tenant = tenant_of(device)
        return tenant if tenant in self._tenants else OTHER

    def _add(self, sums: dict[str, Sums[str]], ledger: Ledger, told: Usage) -> None:
        of = sums.setdefault(self._tenant(ledger.device), Sums())
        for name in USAGE:
            of[name] += getattr(ledger.usage, name) - getattr(told, name)

    def _charge(self, tenant: str, more: Sums[str]) -> None:
        self._committed.labels(tenant).inc(more["committed"])
        self._accepted.labels(tenant).inc(more["accepted"])
        for kind in ROW_KINDS:
            self._rows.labels(tenant, kind).inc(more[f"{kind}_rows"])
        self._engine_s.labels(tenant).inc(more["engine_s"])
        self._bytes.labels(tenant, "in").inc(more["bytes_in"])
        self._bytes.labels(tenant, "out").inc(more["bytes_out"])

    def _look_at(self, gateway: Gateway) -> None:
        verifier, engine = gateway.verifier, gateway.verifier.engine
        self._knee.set(knee(verifier.experience.cost, verifier.scheduler.rows))
        free, retained = engine.free_blocks, engine.retained_blocks
        blocks = (engine.num_blocks - free, retained, free - retained)
        for state, number in zip(BLOCK_STATES, blocks, strict=True):
            self._blocks.labels(state).set(number)
        self._draining.set(verifier.draining)
        self._raise_to(self._grafted, "grafted", verifier.tally.grafted)
        self._raise_to(self._stale, "stale", verifier.tally.stale)
        if self._meter is not None:
            self._raise_to(self._meter_errors, "meter_errors", self._meter.writer.errors)
            self._raise_to(self._meter_lost, "meter_lost", self._meter.writer.lost)

    def _raise_to(self, counter: Counter, name: str, value: int) -> None:
        counter.inc(value - self._tally[name])
        self._tally[name] = value

    def _link_up(self) -> float:
        if self._gateway is None:
            return 0.0
        link = self._gateway.link
        links = link.links if isinstance(link, Links) else [link]
        return sum(one.up for one in links) / len(links)

    def _loop_age_s(self) -> float:
        return time.monotonic() - self._gateway.turned_at if self._gateway and self._gateway.turned_at else 0.0


class LinkCollector(Collector):
    """The link's own counters, read when somebody asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        counters = self._metrics.link_counters()
        messages = CounterMetricFamily("outrider_link_messages", "Messages at the broker", labels=["event"])
        for event in EVENTS:
            messages.add_metric([event], getattr(counters, event))
        sizes = CounterMetricFamily("outrider_link_bytes", "Payloads at the broker", labels=["direction"])
        sizes.add_metric(["in"], counters.bytes_received)
        sizes.add_metric(["out"], counters.bytes_sent)
        yield from (messages, sizes)
        yield CounterMetricFamily("outrider_link_connects", "Connections made", value=counters.connects)
