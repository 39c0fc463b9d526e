"""How long a verdict takes beyond the engine's step: board's link, broker, gateway, ledger, and back."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from pathlib import Path

from cloud.config import CloudConfig, EngineConfig
from cloud.engines import torch_engine
from cloud.engines.base import Outcome, Plan
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine
from cloud.gateway import Gateway
from cloud.verifier import Verifier
from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.messages import Commit, Draft, Message, Open, Opened, decode, encode
from protocol.sampling import Sampling
from protocol.text import Ids, extend_hash, owner_hash, prefix_hashes
from tools.arrivals import p95
from tools.bench.engine import passages
from tools.bench.record import ms
from tools.broker import Broker

DEVICE = "bench.board"


class TimedEngine:
    """The engine, with each step's seconds noted."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.seconds: list[float] = []

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self, plan: Plan) -> Outcome:
        outcome = self._engine.step(plan)
        self.seconds.append(outcome.seconds)
        return outcome


class Client:
    """One session spoken by hand: a draft, its verdict, the next draft."""

    def __init__(self, broker: BrokerConfig) -> None:
        self._inbox: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._echoes: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.link = MqttLink(
            broker,
            "bench-client",
            on_message=self._on_message,
            subscriptions=[(topics.verdict_topic(DEVICE), 0), ("bench/echo", 0)],
        ).start()
        self.link.wait_up(10)

    def _on_message(self, topic: str, payload: bytes) -> None:
        if topic == "bench/echo":
            self._echoes.put(time.perf_counter())
        else:
            self._inbox.put((time.perf_counter(), payload))

    def say(self, topic: str, message, qos: int = 0) -> None:
        self.link.publish(topic, encode(message), qos=qos)

    def hear(self) -> tuple[float, Message]:
        at, payload = self._inbox.get(timeout=30)
        return at, decode(payload)

    def echo(self) -> float:
        """Seconds of one message to the broker and back to this link."""
        started = time.perf_counter()
        self.link.publish("bench/echo", bytes(20))
        return self._echoes.get(timeout=10) - started


def measure(target: Path, *, threads: int, rounds: int) -> dict[str, object]:
    """p50 of verdict minus engine time in ms, with a bare echo through the same broker beside it."""
    engine = TimedEngine(torch_engine.load(target, Numerics(mode="fast"), threads=threads))
    with Broker.start() as broker:
        config = CloudConfig(engine=EngineConfig(model=target), broker=BrokerConfig(port=broker.port))
        verifier = Verifier(
            "vbench",
            engine,
            scheduler=config.scheduler.scheduler(),
            bounds=config.limits.bounds(),
        )
        gateway = Gateway(verifier, config.broker)
        thread = threading.Thread(target=gateway.run, daemon=True)
        thread.start()
        client = Client(config.broker)
        gateway.link.wait_up(10)
        try:
            beyond, echoes = _rounds(client, engine, passages(target, 1, 32)[0], rounds)
        finally:
            client.link.close()
            gateway.stop()
            thread.join(10)
        return {
            "model": engine.info.model,
            "broker": broker.kind,
            "rounds": rounds,
            "verdict_minus_engine_ms": {"p50": ms(statistics.median(beyond)), "p95": ms(p95(beyond))},
            "bare_echo_ms": {"p50": ms(statistics.median(echoes)), "p95": ms(p95(echoes))},
            "engine_ms_p50": ms(statistics.median(engine.seconds)),
        }


def _rounds(client: Client, engine: TimedEngine, text: list[int], rounds: int) -> tuple[list[float], list[float]]:
    """The verifier waits for drafts for ever, so that each draft meets an idle engine and costs exactly one step."""
    session, handle = 77, -1
    ask = Open(session, 0, engine.info.id, len(text), Ids(text), Sampling(), 4 * rounds + 8, (), None)
    client.say(topics.open_topic(DEVICE, engine.info.id), ask, qos=1)
    beyond: list[float] = []
    echoes: list[float] = []
    hash = prefix_hashes(owner_hash(session, "vbench", 0), text)[-1]
    while handle < 0:
        _, message = client.hear()
        if isinstance(message, Opened):
            handle = message.handle
    time.sleep(0.5)
    for seq in range(rounds):
        echoes.append(client.echo())
        before = len(engine.seconds)
        started = time.perf_counter()
        client.say(
            topics.draft_topic(DEVICE, "vbench"),
            Draft(handle, 0, seq % 256, len(text), hash, Ids((1, 2, 3))),
        )
        while True:
            at, message = client.hear()
            if isinstance(message, Commit) and message.base == len(text) and message.ids:
                break
        beyond.append(at - started - sum(engine.seconds[before:]))
        for id in message.ids:
            text.append(id)
            hash = extend_hash(hash, id)
    return beyond, echoes
