"""The same for faults that need certificates to happen: one that ends, one in wrong hands, and a board gone mad."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

from edge.cli import main as edge_cli
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import WireError
from protocol.messages import Draft, Error, Open, VerifierState, decode, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.certified import DEVICE, NEIGHBOUR, STRANGER, CertifiedFleet, certified_fleet, run
from tests.faults.fleet import Child, Fleet
from tests.faults.named import Named, all_wrong, more_texts, said
from tests.link.ends import End
from tests.toys import TARGET
from tools.provision import office
from tools.provision.folder import Folder

LIFE = timedelta(seconds=6)
HOSTILE_S = 3.0
FLOOD_MESSAGES = 200  # at a time


@contextmanager
def certified(folder: Path, seed: int, *devices: str) -> Iterator[tuple[CertifiedFleet, Fleet]]:
    with certified_fleet(folder) as made:
        fleet = Fleet(folder, num_boards=0, num_verifiers=1, step_s=0.01, seed=seed, certified=made)
        for device in devices:
            fleet.add_board(device)
        with fleet:
            yield made, fleet


def renew(made: CertifiedFleet, device: str, life: timedelta) -> datetime:
    """Give the board a certificate for so long; returns its end."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    with (folder := Folder(made.folder / "ca")).held():
        answers, _ = office.renew(folder, [device], now, life, force=True)
        folder.finish()
    answer = made.folder / device / "renewed.json"
    answer.write_bytes(answers[device])
    run(edge_cli, "enroll", "--config", str(made.folder / device / "edge.toml"), "--answer", str(answer))
    return now + life


def certificate_expired(folder: Path, seed: int) -> Named:
    """In mid-text: the connection goes on, the next one is refused, and a new certificate mends it."""
    found = Named("certificate expired in mid-session", "the text goes on until the connection ends, then stands still")
    with certified_fleet(folder) as made:
        ends = renew(made, DEVICE, LIFE)
        fleet = Fleet(folder, num_boards=0, num_verifiers=1, step_s=0.03, seed=seed, certified=made)
        board = fleet.add_board(DEVICE)
        with fleet:
            time.sleep(max(0.0, (ends - datetime.now(timezone.utc)).total_seconds()) + 1.0)
            fleet.wait_writing([board])  # over the connection that was made before
            board.line.outage("cut")
            board.line.outage(None)
            found.error = said(board, "`cert` has expired")
            renew(made, DEVICE, timedelta(days=1))
            board.kill()
            board.start()
            more_texts(fleet, board, 1)
            found.wrong = all_wrong(fleet)
    return found


def foreign_tenant(folder: Path, seed: int) -> Named:
    """A board of another tenant says whatever might harm a text on all topics of the first one's, and listens there."""
    found = Named("an attacker with a valid certificate of another tenant", "nothing")
    with certified(folder, seed, DEVICE) as (made, fleet):
        (board,) = fleet.boards
        heard: list[str] = []
        verdicts, (verifier,) = topics.verdict_topic(DEVICE), fleet.verifiers
        spy = End(
            made.config(STRANGER),
            f"outrider-{DEVICE}",
            on_message=lambda topic, payload: heard.append(topic),
            subscriptions=[("#", 1), (verdicts, 1), (topics.shared_open_filter(TARGET), 1)],
        )
        lies = [
            (topics.open_topic(DEVICE, TARGET), encode(Open(5, 9, TARGET, 1, Ids((9,)), Sampling(), 5))),
            (topics.draft_topic(DEVICE, verifier.name), encode(Draft(1, 0, 1, 17, 1, Ids((1, 2))))),
            (verdicts, encode(Error(5, 0, "bad-open", "a lie"))),
            (topics.verifier_state_topic(verifier.name), encode(VerifierState(verifier.name, "gone"))),
            (topics.device_state_topic(DEVICE), b""),
        ]
        spy.link.wait_up(5.0)
        until = time.monotonic() + HOSTILE_S
        told = 0
        while time.monotonic() < until:
            for topic, payload in lies:
                spy.link.publish(topic, payload, qos=1, retain=told % 2 == 0)
                told += 1
            time.sleep(0.01)
        more_texts(fleet, board, 1)
        spy.link.close(2.0)
        refused = {topic for topic, reason in spy.acks if reason == 0x87}
        if refused == {topic for topic, _ in lies}:
            found.error = "Not authorized (0x87), for each message that it sends"
        foreign = [topic for topic in heard if topic.startswith(f"outrider/v1/{DEVICE}/")]
        found.wrong = all_wrong(fleet) + [f"{STRANGER} reads {topic}" for topic in foreign[:3]]
        if "not connected" in board.log.read_text() or "connection lost" in board.log.read_text():
            found.wrong.append("the board lost its connection")
    return found


def device_that_floods(folder: Path, seed: int) -> Named:
    """A board with a certificate opens sessions, drafts and babbles as fast as the broker takes it."""
    found = Named("a device that floods", "the others' texts come slower, at worst")
    with certified(folder, seed, DEVICE) as (made, fleet):
        (board,), (verifier,) = fleet.boards, fleet.verifiers
        codes: dict[str, str] = {}

        def hear(_: str, payload: bytes) -> None:
            try:
                message = decode(payload)
            except WireError:
                return
            if isinstance(message, Error):
                codes.setdefault(message.code, message.what)

        mad = End(made.config(NEIGHBOUR), "mad", on_message=hear, subscriptions=[(topics.verdict_topic(NEIGHBOUR), 0)])
        mad.link.wait_up(5.0)
        began = time.monotonic()
        flooder = threading.Thread(target=flood, args=(mad.link, verifier, began + HOSTILE_S))
        flooder.start()
        flooder.join()
        ended = time.monotonic()
        at = fleet.await_token(board, ended, 30.0)
        silent_s = fleet.application(board).silent_s(began, at)
        mad.link.close(0.5)
        more_texts(fleet, board, 1)
        found.wrong = all_wrong(fleet)
        if "over-limit" in codes:
            found.error = f"over-limit: {codes['over-limit']}"
        found.seen = f"the others' texts come slower: without a token for {silent_s:.1f} s at worst"
    return found


def flood(link: MqttLink, verifier: Child, until: float) -> None:
    number = 0
    drafts = topics.draft_topic(NEIGHBOUR, verifier.name)
    opens = topics.open_topic(NEIGHBOUR, verifier.name)
    while time.monotonic() < until:
        messages = []
        for _ in range(FLOOD_MESSAGES):
            number += 1
            kind = number % 4
            if kind == 0:
                messages.append((opens, encode(Open(number, 0, TARGET, 3, Ids((1, 2, 3)), Sampling(), 500))))
            elif kind == 1:
                messages.append((drafts, encode(Draft(number % 128, 0, 1, 3, number, Ids((1,) * 40)))))
            else:
                messages.append((drafts, number.to_bytes(8, "big") * 20))
        link.publish_all(messages)
        time.sleep(0.001)
