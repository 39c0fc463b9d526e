"""What an operator sees of a real gateway at a real broker, beside what it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloud.config import CloudConfig, EngineConfig, HttpConfig, MeteringConfig, SchedulerConfig, TenantConfig
from cloud.engines.base import Outcome, Plan
from cloud.gateway import Gateway
from cloud.records import Records
from cloud.serving import make_gateway
from cloud.usage_report import Account, bill
from cloud.watch import Watch
from edge.board import Board, Stream
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import ConfigError, SessionError
from protocol.messages import Commit, Message, Open, decode, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.boards import PROMPT, SAMPLED, SlowEngine, broker_at, make_board, make_request
from tests.toys import TARGET, plain_decode
from tools.broker import Broker, available, free_port
from tools.models import ROOT

LIMIT_S = 20.0

pytestmark = pytest.mark.skipif(not available(), reason="no MQTT broker: install mosquitto, or `pip install iotcore`")


class Watched:
    """A broker, a verifier with everything that looks at it, and boards."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.broker = stack.enter_context(Broker.start())
        self.port = free_port()
        self.engine = SlowEngine(step_s=0.004)
        self.config = CloudConfig(
            engine=EngineConfig(model=Path("none")),
            broker=broker_at(self.broker.port),
            scheduler=SchedulerConfig(probe_s=0.0),
            http=HttpConfig(port=self.port, stuck_s=1.5),
            metering=MeteringConfig(directory=folder / "usage", flush_s=0.5),
            tenants={"acme": TenantConfig()},
            verifier="v-watched",
        )
        self.watch = stack.enter_context(Watch(self.config))

    def serve(self) -> Gateway:
        self.gateway = make_gateway(self.config, self.engine, self.watch)
        self.thread = threading.Thread(target=self.gateway.run, daemon=True)
        self.thread.start()
        self.stack.callback(self.stop)
        self.gateway.link.wait_up(LIMIT_S)
        return self.gateway

    def stop(self) -> None:
        self.gateway.stop()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "the gateway's loop does not end"

    def board(self, name: str) -> Board:
        board = make_board(self.broker.port, name, self.folder / name).start()
        self.stack.callback(board.close)
        board.link.wait_up(LIMIT_S)
        return board

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)

    def figures(self) -> dict[tuple[str, ...], float]:
        """(name, label values in the order of their names ...) to value."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def accounts(self) -> dict[str, Account]:
        lines = Records.read([self.folder / "usage"]).last.values()
        return {device: account for (device, _), account in bill(lines).items()}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(tmp_path, stack)


def read(stream: Stream) -> list[int]:
    watchdog = threading.Timer(LIMIT_S, stream.abandon, [TimeoutError(f"not finished within {LIMIT_S} s")])
    watchdog.start()
    try:
        return [id for ids in stream for id in ids]
    finally:
        watchdog.cancel()


def wait_for(what: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.05)


def test_metrics_and_meter_say_what_the_verifier_did(watched):
    gateway = watched.serve()
    streams = [watched.board(name).open(make_request(i + 1)) for i, name in enumerate(["acme.a", "acme.b", "who.c"])]
    for stream in streams:
        assert read(stream) == plain_decode(PROMPT, SAMPLED, 100)
    wait_for(lambda: gateway.verifier.num_sessions == 0)
    tally = gateway.verifier.tally
    wait_for(lambda: watched.figures()["outrider_committed_tokens_total", "other"] == 100)
    seen = watched.figures()
    assert tally.committed == 300 and seen["outrider_committed_tokens_total", "acme"] == 200
    accepted = seen["outrider_accepted_tokens_total", "acme"] + seen["outrider_accepted_tokens_total", "other"]
    assert 50 < accepted <= tally.guessed, "a guess of the token that the root row drew saved no step"
    rows = {name: value for name, value in seen.items() if name[0] == "outrider_rows_total"}
    assert sum(rows.values()) == tally.rows == seen["outrider_step_rows_sum",]
    assert sum(rows["outrider_rows_total", "root", tenant] for tenant in ("acme", "other")) == 300 - accepted
    assert seen["outrider_step_seconds_count",] == tally.steps == seen["outrider_step_sessions_count",]
    assert seen["outrider_grafted_tokens_total",] == tally.grafted > 0
    assert seen["outrider_stale_tokens_total",] == tally.stale
    assert seen["outrider_sessions_opened_total", "acme"] == 2 and seen["outrider_sessions", "acme"] == 0
    assert seen["outrider_kv_blocks", "used"] == 0 and seen["outrider_link_up",] == 1
    assert seen["outrider_link_connects_total",] == 1 and seen["outrider_link_messages_total", "received"] > 10
    assert seen["outrider_verifier_info", "toy", "exact-toy", TARGET, "v-watched", gateway.verifier.version] == 1
    engine_s = seen["outrider_engine_seconds_total", "acme"] + seen["outrider_engine_seconds_total", "other"]
    assert engine_s == pytest.approx(seen["outrider_step_seconds_sum",])

    watched.stop()
    accounts = watched.accounts()
    assert {device: account.tokens for device, account in accounts.items()} == {
        "acme.a": 100,
        "acme.b": 100,
        "who.c": 100,
    }
    kinds = ("root_rows", "draft_rows", "prefill_rows", "rebuilt_rows")
    assert sum(getattr(account, kind) for account in accounts.values() for kind in kinds) == tally.rows
    assert sum(account.engine_s for account in accounts.values()) == pytest.approx(engine_s, abs=1e-4)
    for way in ("in", "out"):
        of_sessions = (
            seen["outrider_payload_bytes_total", way, "acme"] + seen["outrider_payload_bytes_total", way, "other"]
        )
        metered = sum(getattr(account, f"bytes_{way}") for account in accounts.values())
        # Closes, errors and the verifier's own state belong to no session.
        assert 1000 < of_sessions <= metered <= seen["outrider_link_bytes_total", way]


def test_health_says_what_hinders_it(watched):
    assert watched.get("/healthz").status_code == 200, "loading is not a fault"
    loading = watched.get("/readyz")
    assert loading.status_code == 503 and "loaded" in loading.json()["what"]
    gateway = watched.serve()
    wait_for(lambda: watched.get("/readyz").status_code == 200)
    assert watched.get("/healthz").json() == {"ok": True, "what": ""}
    assert watched.get("/").status_code == 404

    hung = threading.Event()
    whole_step = gateway.verifier.engine.step

    def hang(plan: Plan) -> Outcome:
        hung.wait(LIMIT_S)
        return whole_step(plan)

    gateway.verifier.engine.step = hang
    stream = watched.board("acme.a").open(make_request(1))
    wait_for(lambda: watched.get("/healthz").status_code == 503)
    assert "stuck" in watched.get("/healthz").json()["what"] and watched.get("/readyz").status_code == 503
    hung.set()
    assert read(stream) == plain_decode(PROMPT, SAMPLED, 100)
    wait_for(lambda: watched.get("/healthz").status_code == 200)

    watched.broker.kill()
    wait_for(lambda: watched.get("/readyz").status_code == 503)
    assert "no connection to the broker" in watched.get("/readyz").json()["what"]
    assert watched.get("/healthz").status_code == 200, "a broker's fault is not mended by a restart of the verifier"


def test_a_tenants_tokens_of_the_day_are_counted_by_the_meter(tmp_path):
    with ExitStack() as stack:
        watched = Watched(tmp_path, stack)
        watched.config = msgspec.structs.replace(watched.config, tenants={"acme": TenantConfig(tokens_per_day=150)})
        watched.serve()
        board = watched.board("acme.a")
        assert len(read(board.open(make_request(1)))) == 100
        with pytest.raises(SessionError, match="150"):
            for session in (2, 3):
                read(board.open(make_request(session)))
        assert len(read(watched.board("who.b").open(make_request(4)))) == 100


def test_a_port_that_is_taken_is_named(watched):
    with pytest.raises(ConfigError, match=rf"{watched.port}.*\[http\] port"):
        Watch(watched.config)


def test_a_verifier_that_is_shot_costs_the_bill_nothing_and_nobody_twice(tmp_path):
    """SIGKILL in mid-text, twice; the third verifier finishes. Its file may end anywhere."""
    usage = tmp_path / "usage"
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.start())
        board = make_board(broker.port, "acme.a", tmp_path / "board").start()
        stack.callback(board.close)

        def serve(name: str) -> subprocess.Popen[str]:
            arguments = ["serve", "--port", str(broker.port), "--name", name, "--step-s", "0.02", "--usage", str(usage)]
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.boards", *arguments], cwd=ROOT, stdout=subprocess.PIPE
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            child.stdout.readline()
            return child

        victim = serve("v1")
        stream = board.open(make_request(1, max_tokens=450))
        ids: list[int] = []
        for shots, fresh in enumerate(("v2", "v3")):
            while len(ids) < 150 * (shots + 1):
                ids += next(stream)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            victim = serve(fresh)
        ids += read(stream)
        assert ids == plain_decode(PROMPT, SAMPLED, 450)
        wait_for(lambda: account_of(usage).tokens == 450, 10.0)
    account = account_of(usage)
    assert account.tokens == 450 and account.sessions == 1 and account.prompt_tokens == len(PROMPT)
    assert account.gap_tokens < 300, "the dead verifiers left no line behind"
    assert account.again_tokens <= 2 * 64, "more was drawn twice than a dead verifier was ahead of the board"
    seen = usage_of("--dir", str(usage), "--json")
    assert json.loads(seen)["accounts"][0]["tokens"] == 450
    assert "450" in usage_of("--dir", str(usage)) and "acme" in usage_of("--dir", str(usage))
    assert json.loads(usage_of("--dir", str(usage), "--day", "1999-01-01", "--json"))["accounts"] == []


def account_of(usage: Path) -> Account:
    return bill(Records.read([usage]).last.values()).get(("acme.a", TARGET), Account())


def usage_of(*arguments: str) -> str:
    command = [sys.executable, "-m", "cloud", "usage", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_status_shows_live_figures_beside_what_the_broker_knows(watched):
    watched.engine.step_s = 0.04
    watched.serve()
    watched.board("acme.a").open(make_request(1, max_tokens=400))
    at = ["--broker", f"127.0.0.1:{watched.broker.port}", "--http", f"http://127.0.0.1:{watched.port}"]
    command = [sys.executable, "-m", "cloud", "status", *at]
    said = subprocess.run([*command, "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
    (line,) = map(json.loads, said.stdout.splitlines())
    assert line["verifier"] == "v-watched" and line["status"] == "up" and line["target"] == TARGET
    assert line["live"]["tokens_per_s"] > 0 and line["live"]["step_ms"] > 1
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert shown.count("v-watched") == 2 and "tok/s" in shown and "exact-toy" in shown
    gone = subprocess.run([*command, "--http", "http://127.0.0.1:9"], cwd=ROOT, capture_output=True, text=True)
    assert gone.returncode == 69 and "127.0.0.1:9" in gone.stderr and "v-watched" in gone.stdout


def test_a_verifier_with_a_real_model_is_watched_from_its_start(tmp_path, smollm2):
    """As an operator starts it: ready once the model is loaded, JSON on stderr, and a bill after SIGTERM."""
    port = free_port()
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.start())
        config = tmp_path / "cloud.toml"
        config.write_text(
            f'verifier = "v-real"\n[engine]\nmodel = "{smollm2[1]}"\nthreads = 1\nkv_gib = 0.5\n'
            f"[broker]\nport = {broker.port}\n[scheduler]\nprobe_s = 0.5\n"
            f'[http]\nport = {port}\n[metering]\ndirectory = "usage"\n[tenants.acme]\nsessions = 1\n'
            "[limits]\nquiet_s = 60.0\n"  # a device that says nothing more
        )
        errors = stack.enter_context(open(tmp_path / "log", "w"))
        command = [sys.executable, "-m", "cloud", "--log-format", "json", "serve", "--config", str(config)]
        child = subprocess.Popen(command, cwd=ROOT, stderr=errors)
        stack.callback(child.wait)
        stack.callback(child.kill)

        def answer(path: str) -> httpx.Response | None:
            assert child.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5)
            except httpx.TransportError:
                return None

        wait_for(lambda: answer("/readyz"), 60)
        assert answer("/readyz").json()["what"] == "the engine is being loaded"
        wait_for(lambda: answer("/readyz").status_code == 200, 120)
        found: list[Message] = []
        link = MqttLink(
            broker_at(broker.port),
            "device",
            on_message=lambda topic, payload: found.append(decode(payload)),
            subscriptions=[(topics.verdict_topic("acme.a"), 0)],
        ).start()
        stack.callback(link.close)
        link.wait_up(LIMIT_S)
        target = next(
            sample.labels["target"]
            for family in text_string_to_metric_families(answer("/metrics").text)
            for sample in family.samples
            if sample.name == "outrider_verifier_info"
        )
        for session in (1, 2):
            opened = Open(session, 0, target, 5, Ids((9, 8, 7, 6, 5)), Sampling(), 8)
            link.publish(topics.open_topic("acme.a", target), encode(opened), qos=1)
        wait_for(lambda: any(isinstance(message, Commit) and message.finish for message in found))
        child.terminate()
        assert child.wait(LIMIT_S) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    (refused,) = [line for line in lines if line.get("code") == "over-limit"]
    assert (refused["tenant"], refused["device"], refused["session"]) == ("acme", "acme.a", f"{2:016x}")
    seen = json.loads(usage_of("--config", str(config), "--json"))
    (account,) = seen["accounts"]
    assert (account["device"], account["target"], account["tokens"]) == ("acme.a", target, 8)
    assert account["engine_s"] > 0 and account["prefill_rows"] + account["root_rows"] >= 12
