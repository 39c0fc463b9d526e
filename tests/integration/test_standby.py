"""Two brokers of one authority, as `tools.provision` writes them: verifiers are at both, boards where they can be."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("cryptography")

from cloud.cli import main
from cloud.gateway import Gateway
from cloud.metrics import Metrics
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.board import Board, Stream
from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from link.config import BrokerConfig
from protocol import topics
from protocol.messages import VerifierState, encode
from tests.boards import PROMPT, SAMPLED, TIMING, SlowEngine, make_request
from tests.certified import DEVICE, NEIGHBOUR, STRANGER, CertifiedFleet, certified_fleet
from tests.link.ends import End, until
from tests.toys import TARGET, ToyDrafter, plain_decode
from tools.broker import find_mosquitto, free_port

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

LENGTH = 400
BEYOND_S = 2.0  # what may pass between the news that a broker is gone and the next token


class Reader(threading.Thread):
    """Reads a text as it comes, and notes when."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(daemon=True)
        self.stream, self.ids = stream, list[int]()
        self.times: list[float] = []
        self.start()

    def run(self) -> None:
        for ids in self.stream:
            self.times.append(time.monotonic())
            self.ids += ids

    def next_after(self, at: float) -> float:
        """Seconds from `at` to the next token."""
        return next(one for one in self.times if one > at) - at


class Pair:
    """The first broker and the one that stands by, and who is at them."""

    def __init__(self, first: CertifiedFleet, standby: CertifiedFleet, folder: Path, stack: ExitStack) -> None:
        self.first, self.standby, self.folder, self.stack = first, standby, folder, stack
        self.keepalive_s = 20

    def config(self, user: str) -> BrokerConfig:
        share = self.first.folder / "verifier" / "share" if user == "verifier" else None
        return msgspec.structs.replace(
            self.first.config(user),
            standby=(f"localhost:{self.standby.port}",),
            share_file=share,
            keepalive_s=self.keepalive_s,
        )

    def verifier(self, name: str) -> Gateway:
        engine = SlowEngine(step_s=0.008)
        gateway = Gateway(Verifier(name, engine, scheduler=Scheduler(), bounds=Bounds()), self.config("verifier"))
        thread = threading.Thread(target=gateway.run, daemon=True)
        thread.start()

        def end() -> None:
            gateway.stop()
            thread.join(10.0)

        self.stack.callback(end)
        until(lambda: all(link.up for link in gateway.link.links))
        return gateway

    def board(self, device: str) -> Board:
        config = EdgeConfig(
            device=DeviceConfig(name=device, state=self.folder / device),
            drafter=DrafterConfig(model=Path("none")),
            broker=self.config(device),
            timing=TIMING,
        )
        board = Board(config, ToyDrafter(lambda position: position % 5 == 0, context=2000)).start()
        self.stack.callback(board.close)
        board.link.wait_up(5.0)
        return board


@contextmanager
def at_once(fleet: CertifiedFleet) -> Iterator[None]:
    fleet.start()
    try:
        yield
    finally:
        fleet.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        first = stack.enter_context(certified_fleet(tmp_path / "fleet"))
        standby = CertifiedFleet(first.folder, free_port(), free_port(), name="standby")
        standby.configure()
        stack.enter_context(at_once(standby))
        yield Pair(first, standby, tmp_path, stack.enter_context(ExitStack()))


def whole(reader: Reader) -> list[int]:
    reader.join(20.0)
    assert not reader.is_alive()
    return reader.ids


def test_the_first_broker_dies_for_good_and_every_text_goes_on(pair: Pair) -> None:
    """Nothing is opened again: each session's owner hears its board at the other broker, and answers there."""
    gateways = [pair.verifier("v-1"), pair.verifier("v-2")]
    boards = [pair.board(device) for device in (DEVICE, NEIGHBOUR, STRANGER)]
    readers = [Reader(board.open(make_request(number + 1, max_tokens=LENGTH))) for number, board in enumerate(boards)]
    until(lambda: all(len(reader.ids) > 40 for reader in readers))
    metrics = Metrics()
    metrics.watch(gateways[0])
    assert metrics.registry.get_sample_value("outrider_link_up") == 1.0
    pair.first.kill()
    killed_at = time.monotonic()
    for reader in readers:
        assert whole(reader) == plain_decode(PROMPT, SAMPLED, LENGTH)
        assert reader.stream.run is not None and reader.stream.run.window.epoch == 0
    waits = [reader.next_after(killed_at + 0.05) for reader in readers]
    print("to the next token:", [f"{wait:.2f} s" for wait in waits])
    assert max(waits) < BEYOND_S
    assert {board.link.address for board in boards} == {f"localhost:{pair.standby.port}"}
    assert all(gateway.link.up for gateway in gateways)
    assert metrics.registry.get_sample_value("outrider_link_up") == 0.5
    again = Reader(boards[0].open(make_request(9, max_tokens=40)))
    assert whole(again) == plain_decode(PROMPT, SAMPLED, 40)


def test_the_first_broker_hangs_and_every_text_goes_on(pair: Pair) -> None:
    """Its connections stay open and say nothing: the keepalive is what finds out."""
    pair.keepalive_s = 1
    pair.verifier("v-1")
    board = pair.board(DEVICE)
    reader = Reader(board.open(make_request(1, max_tokens=LENGTH)))
    until(lambda: len(reader.ids) > 40)
    process = pair.first.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: not board.link.up)
        found_out_at = time.monotonic()
        assert whole(reader) == plain_decode(PROMPT, SAMPLED, LENGTH)
        assert reader.next_after(found_out_at) < BEYOND_S
    finally:
        process.send_signal(signal.SIGCONT)


def test_nobody_is_split_when_the_first_broker_comes_back(pair: Pair) -> None:
    """One board stays at the standby, another starts at the first, both at the same verifier; then the standby dies."""
    gateway = pair.verifier("v-1")
    early = pair.board(DEVICE)
    reader = Reader(early.open(make_request(1, max_tokens=LENGTH)))
    until(lambda: len(reader.ids) > 20)
    pair.first.kill()
    until(lambda: early.link.up and early.link.address.endswith(str(pair.standby.port)))
    pair.first.start()
    until(lambda: all(link.up for link in gateway.link.links))
    late = pair.board(NEIGHBOUR)
    assert late.link.address.endswith(str(pair.first.port))
    other = Reader(late.open(make_request(2, max_tokens=LENGTH)))
    until(lambda: len(other.ids) > 20)
    assert not reader.stream.run.window.done
    pair.standby.kill()
    until(lambda: early.link.up and early.link.address.endswith(str(pair.first.port)))
    for one in (reader, other):
        assert whole(one) == plain_decode(PROMPT, SAMPLED, LENGTH)
        assert one.stream.run.window.epoch == 0


def test_a_board_that_starts_while_the_first_broker_is_away(pair: Pair) -> None:
    pair.first.kill()
    config = pair.config("verifier")
    engine = SlowEngine(step_s=0.004)
    gateway = Gateway(Verifier("v-late", engine, scheduler=Scheduler(), bounds=Bounds()), config)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    pair.stack.callback(lambda: (gateway.stop(), thread.join(10.0)))
    gateway.link.wait_up(5.0)
    board = pair.board(DEVICE)
    assert board.find_target(5.0).verifier == "v-late"
    assert whole(Reader(board.open(make_request(1, max_tokens=40)))) == plain_decode(PROMPT, SAMPLED, 40)


def test_the_standby_is_held_to_the_same_access_list(pair: Pair) -> None:
    """A board revoked at both is let in at neither, and no board reads another's verdicts there."""
    stranger = End(pair.standby.config(STRANGER), "s", subscriptions=[(topics.verdict_topic(DEVICE), 0), ("#", 0)])
    pair.stack.callback(stranger.link.close, 0.0)
    stranger.link.wait_up(5.0)
    pair.verifier("v-1")
    pair.first.kill()
    board = pair.board(DEVICE)
    assert whole(Reader(board.open(make_request(1, max_tokens=40)))) == plain_decode(PROMPT, SAMPLED, 40)
    assert {topic.split("/")[2] for topic, _ in stranger.messages} <= {"verifiers"}


def test_retained_states_survive_a_broker_that_is_killed(pair: Pair) -> None:
    """What was written at its last save is there before its owners are."""
    topic = topics.verifier_state_topic("v-1")
    pair.first.stop()
    pair.first.start(autosave_interval=1)
    pair.first.join("verifier").link.publish(topic, b"here", qos=1, retain=True)
    saved = pair.folder / "fleet" / "broker-state" / "mosquitto.db"
    until(lambda: saved.exists() and b"here" in saved.read_bytes())
    pair.first.part()
    pair.first.kill()
    pair.first.start()
    device = pair.first.join(DEVICE, topic)
    until(lambda: device.messages == [(topic, b"here")])


def test_what_boards_ask_for_is_what_two_brokers_serve(pair: Pair) -> None:
    """A verifier's states are retained at both, and both are left with a goodbye."""
    gateway = pair.verifier("v-1")
    topic = topics.verifier_state_topic("v-1")
    readers = [place.join(DEVICE, topic) for place in (pair.first, pair.standby)]
    until(lambda: all(b"up" in b"".join(reader.payloads()) for reader in readers))
    assert gateway.verifier.engine.info.id == TARGET
    gateway.stop()
    until(lambda: all(b"gone" in reader.payloads()[-1] for reader in readers))


def test_status_asks_at_all_brokers(pair: Pair) -> None:
    """A verifier that is at both is one line; one that only the second knows is there too."""
    pair.verifier("v-1")
    topic = topics.verifier_state_topic("v-2")
    pair.standby.join("verifier").link.publish(topic, encode(VerifierState("v-2", "gone")), qos=1, retain=True)
    home = pair.first.folder / "verifier"
    files = "".join(
        f'{key} = "{home / name}"\n' for key, name in (("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "key.pem"))
    )
    text = '[engine]\nmodel = "none"\n'
    for name, port in (("first", pair.first.port), ("second", pair.standby.port)):
        text += f"[brokers.{name}]\nport = {port}\n[brokers.{name}.tls]\n{files}"
    path = pair.folder / "cloud.toml"
    path.write_text(text)
    result = CliRunner().invoke(main, ["status", "--config", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["verifier"] for line in result.stdout.splitlines()] == ["v-1", "v-2"]
    pair.standby.part()
