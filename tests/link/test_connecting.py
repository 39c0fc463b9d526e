"""Brokers that are not there, say nothing, refuse or go away: each is named, and tried again."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol.errors import ConfigError, LinkError
from tests.link.ends import Make, until
from tools.broker import Broker, available, find_mosquitto, free_port
from tools.wan import WanThread

pytestmark = pytest.mark.skipif(not available(), reason="no MQTT broker is installed")
mosquitto_only = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


def test_an_absent_broker_is_named_and_tried_again(end: Make) -> None:
    port = free_port()
    one = end(port, "one", up=False)
    until(lambda: len(one.states) >= 3)
    assert not any(up for up, _ in one.states)
    assert f"127.0.0.1:{port}: connection refused. Check that the broker runs" in one.states[0][1]
    with pytest.raises(LinkError, match="connection refused"):
        one.link.wait_up(0.0)


def test_a_host_that_does_not_exist_is_named(end: Make) -> None:
    one = end(1883, "one", up=False, config={"host": "broker.invalid"})
    until(lambda: one.states != [])
    assert "broker.invalid:1883: no such host" in one.states[0][1]


def test_a_listener_that_says_nothing_is_named(end: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = end(silent.getsockname()[1], "one", up=False, config={"connect_timeout_s": 0.3})
        until(lambda: one.states != [])
        assert "the broker does not answer" in one.states[0][1]


def test_a_listener_that_talks_nonsense_is_named_and_does_not_end_the_link(end: Make) -> None:
    connack = b"\x20\x09\x00\x00\x06\x21\x00\x14\x22\x00\x0a"  # success, then bytes that are no MQTT
    nonsense = [
        b"\xff" * 100,
        b"\x20\x03\x00\x00\xff",
        connack + b"\x30\x03\xff\xff\x00",
        b"HTTP/1.1 400 Bad Request\r\n",
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            for data in nonsense:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(data)
                    connection.settimeout(0.3)
                    with suppress(OSError):
                        while connection.recv(1024):
                            pass

        thread = threading.Thread(target=talk)
        thread.start()
        one = end(server.getsockname()[1], "one", up=False, config={"connect_timeout_s": 0.5})
        thread.join(10.0)
        assert not thread.is_alive()
        until(lambda: sum(not up for up, _ in one.states) >= len(nonsense))


def test_two_clients_with_one_id_are_hinted_at_each_other(broker: Broker, end: Make) -> None:
    """Brokers may give no reason (mosquitto 2.0 and rumqttd do not), so the hint is there without one."""
    one = end(broker.port, "one", config={"client_id": "same"})
    end(broker.port, "two", config={"client_id": "same"})
    until(lambda: len(one.states) > 1)
    assert "another process with the client id 'same'" in one.states[1][1]


def test_wrong_credentials_are_named_and_tried_again_until_they_are_right(end: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong\n")
    with Broker.start(password=("board", "right")) as broker:
        config = {"username": "board", "password_file": secret}
        one = end(broker.port, "one", up=False, config=config)
        until(lambda: len(one.states) >= 2)
        if broker.kind == "mosquitto":
            assert f"127.0.0.1:{broker.port}: the broker refused this client: Not authorized" in one.states[0][1]
            assert "password_file" in one.states[0][1]
        secret.write_text("right\n")
        one.link.wait_up(5.0)


def test_a_password_file_that_is_missing_is_a_wrong_configuration(tmp_path: Path) -> None:
    config = BrokerConfig(username="u", password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read password_file"):
        MqttLink(config, "x", on_message=lambda topic, payload: None)


# When the connection breaks.


def test_reconnects_after_the_broker_was_killed_and_subscribes_again(end: Make) -> None:
    with Broker.start() as first:
        one = end(first.port, "one", subscriptions=[("again", 1)])
        first.kill()
        until(lambda: one.states[-1][0] is False)
        with Broker.start(first.port):
            one.link.wait_up(5.0)
            one.link.publish("again", b"x", 1)
            until(lambda: one.payloads() == [b"x"])
            assert one.link.counters().connects == 2


def test_the_first_attempts_to_reconnect_are_within_a_second(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        one = end(wan.port, "one", config={"backoff_max_s": 30.0})
        wan.set_outage("cut")
        until(lambda: not one.link.up)
        wan.set_outage(None)
        start = time.monotonic()
        one.link.wait_up(3.0)
        assert time.monotonic() - start < 1.2


def test_qos_1_survives_an_outage_in_order(broker: Broker, end: Make) -> None:
    """Each arrives at least once, and first arrivals are in order."""
    with WanThread(("127.0.0.1", broker.port), rtt_s=0.02) as wan:
        reader = end(broker.port, "reader", subscriptions=[("outage", 0)])
        writer = end(wan.port, "writer")
        for number in range(60):
            if number == 20:
                wan.set_outage("cut")
            if number == 40:
                wan.set_outage(None)
            writer.link.publish("outage", bytes([number]), 1)
            time.sleep(0.003)
        until(lambda: len(set(reader.payloads())) == 60)
        firsts = list(dict.fromkeys(reader.payloads()))
        assert firsts == [bytes([number]) for number in range(60)]
