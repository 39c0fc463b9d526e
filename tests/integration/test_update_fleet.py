"""A fleet's model is replaced from afar: signed, announced, fetched, tried on real sessions, kept or rolled back. The
text is the target's before, during and after.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from edge.drafters import manifest
from edge.text import Text
from link.config import BrokerConfig
from protocol.sampling import Sampling
from tests.commands import NUM_TOKENS, PROMPT, CommandFleet
from tests.edge.https import Server
from tools.broker import available
from tools.demo.reference import decode_alone
from tools.release.fleet import device_states

ROUNDS = 20

pytestmark = pytest.mark.skipif("mosquitto" not in available(), reason="mosquitto is not installed")


def named(drafter: Path, folder: Path, name: str, *, broken: bool = False) -> Path:
    """The drafter as another release; broken: it guesses what nobody says, and nothing in its manifest tells that."""
    shutil.copytree(drafter, folder)
    if broken:
        garble(folder)
    facts = manifest.read(folder, "drafter")
    hashed = hashlib.sha256()
    for file in facts.weights_files:
        hashed.update((folder / file).read_bytes())
    expected = None if broken else facts.golden
    facts = msgspec.structs.replace(facts, name=name, weights_digest=hashed.hexdigest(), golden=expected)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(facts))
    return folder


def garble(folder: Path) -> None:
    """Noise instead of the quantised weights of one layer in two: finite, and of no use."""
    path = folder / manifest.read(folder, "drafter").weights_files[0]
    rng, content = random.Random(1), path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    packed = [tensors[name]["data_offsets"] for name in tensors if name.endswith(".packed") and name[0].isdigit()]
    assert packed
    with path.open("r+b") as file:
        for first, end in packed[::2]:
            file.seek(start + first)
            file.write(rng.randbytes(end - first))


def alone(drafter: Path, target: Path) -> str:
    """The target's own text."""
    text = Text.load(drafter, manifest.read(drafter, "drafter"))
    engine = load(target, Numerics(mode="exact"), threads=2)
    prompt = text.chat([{"role": "user", "content": PROMPT}])
    return text.decode(decode_alone(engine, prompt, Sampling(), NUM_TOKENS, sorted(text.stop_ids)))


def test_a_model_is_replaced_and_a_worse_one_is_rolled_back_under_real_sessions(smollm2, tmp_path):
    drafter, target = smollm2
    (tmp_path / "tls").mkdir()
    fleet = CommandFleet(tmp_path, drafter, target)
    with Server(tmp_path / "tls") as server:
        try:
            operator = tmp_path / "release.toml"
            operator.write_text(f"[broker]\nport = {fleet.broker.port}\n")
            key = tmp_path / "release.key"
            public = release(fleet, "key", key).strip()
            fleet.edge_config = fleet.write_edge(
                updates=f'keys = ["{public}"]\nca = "{server.ca}"\ntrial_rounds = {ROUNDS}\ntrial_margin = 0.02'
            )
            fleet.start_verifier("v1")
            fleet.start_board()
            expected = alone(drafter, target)

            def announce(name: str, *, broken: bool = False) -> None:
                folder = named(drafter, tmp_path / name, name, broken=broken)
                server.files.update({path.name: path.read_bytes() for path in folder.iterdir()})
                out = tmp_path / f"{name}.json"
                options = ("--release", name, "--key", key, "--out", out, "--serials", tmp_path / "serials.json")
                release(fleet, "sign", "model", folder, "--url", server.url(""), *options)
                release(fleet, "announce", out, "--config", operator, "--public-key", public)

            def says() -> str:
                (state,) = device_states(BrokerConfig(port=fleet.broker.port), 10).values()
                return f"{state.status}, {state.releases},"

            def until_says(words: str) -> None:
                fleet.until(lambda: words in says(), 120)
                fleet.until(fleet.api_is_up, 60)

            def talk() -> str:
                """A request in the seconds in which the board begins again is refused: this application asks again."""
                while True:
                    try:
                        return "".join(fleet.ask(temperature=0))
                    except httpx.TransportError:
                        fleet.until(fleet.api_is_up, 60)

            def talk_until(words: str) -> None:
                for _ in range(20):
                    assert talk() == expected
                    if words in says():
                        return
                raise AssertionError(f"never said {words!r}: {fleet.logs()}")

            short = "".join(fleet.ask(temperature=0, max_tokens=12))
            assert expected.startswith(short)
            announce("m-2")
            until_says("online, model m-2 (on trial),")
            talk_until("online, model m-2,")
            announce("m-3", broken=True)
            until_says("online, model m-3 (on trial),")
            talk_until("rolled back model m-3")
            until_says("online, model m-2,")
            assert talk() == expected
            told = release(fleet, "status", "--config", operator)
            assert "     1 model m-2\n" in told and "     1 rolled back model m-3\n" in told, told
            found = fleet.run("edge", "check", "--config", str(fleet.edge_config))
            assert "model m-2" in found.stdout and found.returncode == 0, found.stdout
        finally:
            fleet.stop()


def release(fleet: CommandFleet, *arguments: object) -> str:
    done = fleet.run("tools.release", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout
