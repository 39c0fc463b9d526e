"""Configuration: what a person gets told about each kind of mistake, and what a right file becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, field

from link.config import BrokerConfig, Section, load
from protocol.errors import ConfigError


class Drafter(Section, frozen=True):
    model: Path
    threads: Annotated[int, Meta(ge=1)] = 2
    temperature: float = 0.0


class Board(Section, frozen=True):
    drafter: Drafter
    broker: BrokerConfig = BrokerConfig()
    targets: list[Drafter] = field(default_factory=list)
    named: dict[str, Drafter] = field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "edge.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), Board)
    return str(caught.value).replace(f"{folder}/", "")


GOOD = '[drafter]\nmodel = "models/d"\n'


def test_reads_into_frozen_structs_with_defaults(tmp_path: Path) -> None:
    board = load(write(tmp_path, GOOD + '[broker]\nhost = "broker.example"\nkeepalive_s = 7\n'), Board)
    assert board.drafter.threads == 2
    assert board.broker.address == "broker.example:1883" and board.broker.keepalive_s == 7
    with pytest.raises(AttributeError):
        board.drafter.threads = 3  # type: ignore[misc]


def test_relative_paths_are_the_files_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    text = GOOD + '[broker]\nusername = "u"\npassword_file = "~/secret"\n[broker.tls]\nca = "/etc/ca.pem"\n'
    board = load(write(tmp_path, text), Board)
    assert board.drafter.model == tmp_path / "models/d"
    assert board.broker.password_file == Path("/home/somebody/secret")
    assert board.broker.tls is not None and board.broker.tls.ca == Path("/etc/ca.pem")


def test_a_standby_is_another_place_with_all_else_the_same() -> None:
    broker = BrokerConfig(host="a", port=8883, standby=("b", "c:443", "[::1]:8884"), keepalive_s=7)
    assert [place.address for place in broker.places] == ["a:8883", "b:8883", "c:443", "::1:8884"]
    assert {place.keepalive_s for place in broker.places} == {7} and not any(place.standby for place in broker.places)


def test_an_integer_will_do_for_a_float(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD + "temperature = 1"), Board).drafter.temperature == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            GOOD + "thread = 3",
            "edge.toml: [drafter] unknown key `thread`; known: model, threads, temperature. Did you mean `threads`?",
        ),
        (GOOD + "[broker]\nzzz = 1", "edge.toml: [broker] unknown key `zzz`; known: host, port, tls,"),
        (GOOD + "[brokers]\n", "edge.toml: unknown key `brokers`; known: drafter, broker, targets, named. Did you"),
        (
            GOOD + "[broker.tls]\nkeys = 'x'",
            "[broker.tls] unknown key `keys`; known: ca, cert, key. Did you mean `key`?",
        ),
        ("[drafter]\nthreads = 1", "edge.toml: [drafter] missing key `model`"),
        ("", "edge.toml: missing key `drafter`"),
        (GOOD + "threads = 'two'", "edge.toml: [drafter] `threads`: Expected `int`, got `str`"),
        (GOOD + "threads = 0", "edge.toml: [drafter] `threads`: Expected `int` >= 1"),
        (GOOD + "[broker]\nport = 65536", "edge.toml: [broker] `port`: Expected `int` <= 65535"),
        (GOOD + "[broker]\npassword_file = 'x'", "edge.toml: [broker] `password_file` needs a `username`"),
        (
            GOOD + "[broker]\nstandby = ['b:x']",
            "edge.toml: [broker] `standby` has 'b:x', which is not host or host:port",
        ),
        (GOOD + "[broker]\nstandby = ['mqtts://b:1']", "[broker] `standby` has 'mqtts://b:1', which"),
        (GOOD + "[broker]\ntransport = 'ws'", "edge.toml: [broker] `transport`: Invalid enum value 'ws'"),
        (GOOD + "[broker]\npath = 'mqtt'", "edge.toml: [broker] `path`: Expected `str` matching regex"),
        (GOOD + "[broker]\nproxy = 'p:3128'", "edge.toml: [broker] `proxy` is not http://host:port or http://user"),
        (GOOD + "[broker.tls]\ncert = 'x'", "edge.toml: [broker.tls] `cert` and `key` belong together"),
        ("[drafter]\nmodel = 3", "edge.toml: [drafter] `model`: Expected a path"),
        ("drafter = 3", "edge.toml: [drafter] Expected `object`, got `int`"),
        (GOOD + "[[targets]]\nmodel = 'a'\n[[targets]]\nmodle = 'a'", "unknown key `modle`; known: model, threads"),
        (GOOD + "[named.one]\nmodel = 'm'\nthreds = 1", "unknown key `threds`; known: model, threads"),
        ("[drafter\n", "edge.toml: is not valid TOML: "),
    ],
)
def test_a_mistake_is_named_by_file_section_and_key(tmp_path: Path, text: str, says: str) -> None:
    assert says in complaint(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load(tmp_path / "none.toml", Board)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, Board)
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=r"bytes\.toml: is not UTF-8"):
        load(tmp_path / "bytes.toml", Board)


def test_a_wrong_configuration_has_its_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, ""), Board)
    assert caught.value.exit_code == 78
