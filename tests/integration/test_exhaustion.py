"""A board of one tenant takes all that its broker gives, in four ways; the texts of another tenant go on.

With a broker for each tenant none of the ways reaches the other, nor do all at once. At one broker for both, three of
them do not, one at a time.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("cryptography")

from cloud.gateway import Gateway
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.board import Board
from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from link.config import BrokerConfig
from protocol.errors import LinkError
from tests.boards import PROMPT, SAMPLED, TIMING, SlowEngine, make_request
from tests.certified import DEVICE, STRANGER, CertifiedFleet, certified_fleet
from tests.link.ends import End, until
from tests.toys import ToyDrafter, plain_decode
from tools.broker import find_mosquitto
from tools.models import ROOT

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

LIMITS = {"memory_limit": 24_000_000, "max_connections": 60}  # soon reached
LENGTH = 150
LIMIT_S = 15.0
WAYS = ["retained", "filters", "connections", "publishes"]
REFUSED = {"retained", "filters", "connections"}


class Tenants:
    """One tenant's fleet, another's, and the verifier of both."""

    def __init__(self, ours: CertifiedFleet, theirs: CertifiedFleet, folder: Path, stack: ExitStack) -> None:
        self.ours, self.theirs = ours, theirs
        brokers = [self.at(fleet) for fleet in ([ours] if ours is theirs else [ours, theirs])]
        verifier = Verifier("v-1", SlowEngine(step_s=0.004), scheduler=Scheduler(), bounds=Bounds())
        self.gateway = Gateway(verifier, *brokers)
        thread = threading.Thread(target=self.gateway.run, daemon=True)
        thread.start()
        stack.callback(lambda: (self.gateway.stop(), thread.join(10.0)))
        self.gateway.link.wait_up(5.0)
        self.board = self.make_board(ours, DEVICE, folder)
        stack.callback(self.board.close)
        self.sessions = 0

    def at(self, fleet: CertifiedFleet) -> BrokerConfig:
        return msgspec.structs.replace(fleet.config("verifier"), share_file=self.ours.folder / "verifier" / "share")

    def make_board(self, fleet: CertifiedFleet, device: str, folder: Path) -> Board:
        config = EdgeConfig(
            device=DeviceConfig(name=device, state=folder / device),
            drafter=DrafterConfig(model=Path("none")),
            broker=fleet.config(device),
            timing=TIMING,
        )
        board = Board(config, ToyDrafter(lambda position: position % 5 == 0, context=2000)).start()
        board.link.wait_up(5.0)
        return board

    def write(self, board: Board) -> None:
        """One text, which must be right, in time, and without a second open."""
        self.sessions += 1
        stream = board.open(make_request(self.sessions, max_tokens=LENGTH))
        watchdog = threading.Timer(LIMIT_S, stream.abandon, [TimeoutError(f"not finished within {LIMIT_S} s")])
        watchdog.start()
        try:
            assert [token for ids in stream for token in ids] == plain_decode(PROMPT, SAMPLED, LENGTH)
        finally:
            watchdog.cancel()
        assert stream.run is not None and stream.run.window.epoch == 0

    @contextmanager
    def attack(self, *ways: str) -> Iterator[None]:
        """Until the broker has refused what it can refuse, and as long as this lasts."""
        fleet = self.theirs
        command = [sys.executable, "-m", "tests.flood", "--port", str(fleet.port), "--verifier", "v-1"]
        command += ["--folder", str(fleet.folder / STRANGER)]
        floods = [subprocess.Popen([*command, way], cwd=ROOT, stdout=subprocess.PIPE, text=True) for way in ways]
        try:
            for way, flood in zip(ways, floods, strict=True):
                assert flood.stdout is not None
                assert flood.stdout.readline() == "begun\n"
                if way in REFUSED:
                    assert flood.stdout.readline() == "refused\n"
            yield
        finally:
            for flood in floods:
                flood.kill()
                flood.wait()
            if self.ours is not self.theirs:
                self._renew()

    def _renew(self) -> None:
        """The other tenant's broker as it was before: mosquitto 2.0 can have ended where it ran out of memory."""
        self.theirs.stop()
        (self.theirs.folder / "broker-state" / "mosquitto.db").unlink(missing_ok=True)
        self.theirs.start(**LIMITS)
        until(lambda: all(link.up for link in self.gateway.link.links))


@contextmanager
def tenants(folder: Path, *, apart: bool) -> Iterator[Tenants]:
    with ExitStack() as stack:
        ours = stack.enter_context(certified_fleet(folder / "ours"))
        theirs = stack.enter_context(certified_fleet(folder / "theirs")) if apart else ours
        theirs.stop()
        theirs.start(**LIMITS)
        yield Tenants(ours, theirs, folder, stack.enter_context(ExitStack()))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with tenants(tmp_path_factory.mktemp("apart"), apart=True) as made:
        yield made


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with tenants(tmp_path_factory.mktemp("together"), apart=False) as made:
        yield made


@pytest.mark.parametrize("ways", [("connections",), ("publishes",), tuple(WAYS)], ids=" and ".join)
def test_with_a_broker_of_its_own_a_tenant_cannot_be_stopped(apart: Tenants, ways: tuple[str, ...]) -> None:
    with apart.attack(*ways):
        before = sum(apart.gateway.verifier.tally.errors.values())
        apart.write(apart.board)
        assert apart.gateway.link.up and apart.board.link.counters().connects == 1
        if ways == ("publishes",):
            until(lambda: sum(apart.gateway.verifier.tally.errors.values()) > before + 100)


def test_both_tenants_write_at_the_one_verifier(apart: Tenants, tmp_path: Path) -> None:
    theirs = apart.make_board(apart.theirs, STRANGER, tmp_path)
    try:
        apart.write(theirs)
        apart.write(apart.board)
    finally:
        theirs.close()


def test_another_tenant_s_certificate_is_not_let_in(apart: Tenants) -> None:
    files = apart.theirs.config(STRANGER).tls
    assert files is not None
    own_ca = msgspec.structs.replace(files, ca=apart.ours.folder / DEVICE / "ca.pem")
    config = msgspec.structs.replace(apart.ours.config(STRANGER), tls=own_ca)
    end = End(config, f"thief-{time.monotonic_ns()}")
    try:
        with pytest.raises(LinkError, match="does not know the authority"):
            end.link.wait_up(1.0)
    finally:
        end.link.close(0.0)


@pytest.mark.parametrize("way", sorted(REFUSED))
def test_at_one_broker_what_it_refuses_stops_nobody(together: Tenants, way: str) -> None:
    """Boards that are connected stay so, and write; who has no connection may not get one."""
    with together.attack(way):
        together.write(together.board)
        assert together.board.link.counters().connects == 1
