"""`python -m tools.release`: keys, manifests and announcements, as a board takes them."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edge.updates.manifest import ModelRelease, RuntimeRelease, SettingsRelease, open_payload
from edge.updates.settings import Settings
from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol.messages import DeviceState, encode
from protocol.topics import device_state_topic
from tests.edge.releases import TOKENIZER_DIGEST, model_files, wheel
from tools.broker import Broker, available
from tools.release import manifests
from tools.release.__main__ import main


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def key(tmp_path) -> tuple[Path, str]:
    return tmp_path / "release.key", run("key", tmp_path / "release.key").strip()


def sign(tmp_path: Path, key: tuple[Path, str], kind: str, *arguments: object, name: str = "r-1", code: int = 0) -> str:
    out = tmp_path / f"{name}.json"
    common = ("--key", key[0], "--out", out, "--release", name, "--serials", tmp_path / "serials.json")
    return run("sign", kind, *arguments, *common, code=code)


def signed(tmp_path: Path, key: tuple[Path, str], name: str = "r-1"):
    return manifests.read_signed(tmp_path / f"{name}.json", (key[1],))


def directory(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_a_key_is_private_and_never_written_over(key):
    assert key[0].stat().st_mode & 0o777 == 0o600
    assert manifests.public_key(manifests.load_key(key[0])) == key[1]
    before = key[0].read_bytes()
    run("key", key[0], code=78)
    assert key[0].read_bytes() == before


def test_a_model_is_signed_with_its_files_and_its_tokenizer(tmp_path, key):
    folder = directory(tmp_path / "m", model_files("small"))
    options = ("--url", "https://r.example/m/", "--board", "raspberry-pi-5", "--percent", 5)
    sign(tmp_path, key, "model", folder, *options)
    _, release = signed(tmp_path, key)
    assert isinstance(release, ModelRelease) and release.tokenizer_digest == TOKENIZER_DIGEST
    assert {file.name: file.size for file in release.files} == {n: len(d) for n, d in model_files("small").items()}
    assert release.files[0].url == f"https://r.example/m/{release.files[0].name}"
    assert (release.percent, release.boards) == (5, ("raspberry-pi-5",))


def test_a_model_that_is_not_what_its_own_manifest_says_is_not_signed(tmp_path, key):
    folder = directory(tmp_path / "m", {**model_files("small"), "model.onnx": b"other"})
    sign(tmp_path, key, "model", folder, "--url", "https://r.example/m", code=66)
    assert not (tmp_path / "r-1.json").exists()


def test_a_runtime_is_its_wheels(tmp_path, key):
    folder = directory(tmp_path / "w", {"outrider-1.2-py3-none-any.whl": wheel("1.2"), "notes.txt": b""})
    sign(tmp_path, key, "runtime", folder, "--url", "https://r.example/w", "--version", "1.2")
    _, release = signed(tmp_path, key)
    assert isinstance(release, RuntimeRelease) and [f.name for f in release.files] == ["outrider-1.2-py3-none-any.whl"]


def test_what_a_board_would_refuse_is_not_written(tmp_path, key):
    folder = directory(tmp_path / "m", model_files("small"))
    sign(tmp_path, key, "model", folder, "--url", "http://r.example/m", code=65)
    assert not (tmp_path / "r-1.json").exists()


def test_serial_numbers_grow_by_channel_and_kind(tmp_path, key):
    for name in ("a", "b"):
        sign(tmp_path, key, "settings", "--policy", "chain", name=name)
    sign(tmp_path, key, "settings", "--policy", "chain", "--channel", "beta", name="c")
    assert [signed(tmp_path, key, name)[1].serial for name in "abc"] == [1, 2, 1]


def test_settings_hold_what_was_said_and_no_more(tmp_path, key):
    sign(tmp_path, key, "settings", "--patience-s", 0.3, "--data-cap-mb", 200)
    _, release = signed(tmp_path, key)
    assert isinstance(release, SettingsRelease) and release.settings == Settings(patience_s=0.3, data_cap_mb=200)


def test_the_signature_is_one_that_openssl_agrees_with(tmp_path, key):
    sign(tmp_path, key, "settings", "--policy", "auto")
    path = tmp_path / "r-1.json"
    command = ["openssl", "pkeyutl", "-verify", "-inkey", key[0], "-rawin", "-in", path, "-sigfile", f"{path}.sig"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert "Verified Successfully" in done.stdout, done.stderr


@pytest.mark.skipif("mosquitto" not in available(), reason="mosquitto is not installed")
def test_an_announcement_is_retained_at_each_broker_for_boards_that_come_later(tmp_path, key):
    sign(tmp_path, key, "settings", "--policy", "chain")
    heard: queue.Queue[tuple[str, bytes]] = queue.Queue()
    with Broker.start(kind="mosquitto") as broker, Broker.start(kind="mosquitto") as standby:
        config = tmp_path / "release.toml"
        config.write_text(f'[broker]\nport = {broker.port}\nstandby = ["127.0.0.1:{standby.port}"]\n')
        said = run("announce", tmp_path / "r-1.json", "--config", config, "--public-key", key[1])
        assert said.count("outrider/v1/updates/stable/settings") == 2
        for place in (broker, standby):
            board = MqttLink(
                BrokerConfig(port=place.port),
                "board",
                on_message=lambda topic, payload: heard.put((topic, payload)),
                subscriptions=[("outrider/v1/updates/stable/+", 1)],
            ).start()
            topic, payload = heard.get(timeout=5.0)
            board.close()
            assert topic == "outrider/v1/updates/stable/settings"
            assert open_payload(payload, [key[1]]) == signed(tmp_path, key)[1]


@pytest.mark.skipif("mosquitto" not in available(), reason="mosquitto is not installed")
def test_what_boards_run_is_counted_wherever_they_are(tmp_path):
    with Broker.start(kind="mosquitto") as broker, Broker.start(kind="mosquitto") as standby:
        config = tmp_path / "release.toml"
        config.write_text(f'[broker]\nport = {broker.port}\nstandby = ["127.0.0.1:{standby.port}"]\n')
        tell(broker, "acme.kitchen", DeviceState("online", "1.2", releases="model m-2 (on trial), runtime flashed"))
        tell(broker, "acme.moved", DeviceState("offline"))
        tell(standby, "acme.moved", DeviceState("online", releases="model m-1, runtime flashed"))
        back = "model m-1, runtime flashed, rolled back model m-2: worse, by 0.3"
        tell(standby, "acme.yard", DeviceState("online", releases=back))
        said = run("status", "--config", config)
    assert "acme.kitchen  online  1.2  model m-2 (on trial), runtime flashed\n" in said
    assert "acme.moved  online  model m-1" in said and "worse, by 0.3" in said
    counted = [line.strip() for line in said.splitlines()[3:]]
    assert counted == ["2 model m-1", "1 model m-2 (on trial)", "1 rolled back model m-2", "3 runtime flashed"]


def tell(broker: Broker, device: str, state: DeviceState) -> None:
    link = MqttLink(BrokerConfig(port=broker.port), device, on_message=lambda topic, payload: None).start()
    link.wait_up(5.0)
    link.publish(device_state_topic(device), encode(state), qos=1, retain=True)
    assert link.close(5.0)


def test_what_was_changed_after_signing_is_not_announced(tmp_path, key):
    sign(tmp_path, key, "settings", "--policy", "chain")
    path = tmp_path / "r-1.json"
    changed = {**msgspec.json.decode(path.read_bytes()), "percent": 1}
    path.write_bytes(msgspec.json.encode(changed))
    (tmp_path / "release.toml").write_text("[broker]\nport = 1\n")
    run("announce", path, "--config", tmp_path / "release.toml", "--public-key", key[1], code=65)


def test_a_broker_that_is_away_is_named_by_its_exit_code(tmp_path, key):
    sign(tmp_path, key, "settings", "--policy", "chain")
    (tmp_path / "release.toml").write_text("[broker]\nport = 1\n")
    command = [sys.executable, "-m", "tools.release", "announce", tmp_path / "r-1.json"]
    command += ["--config", tmp_path / "release.toml", "--wait-s", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 69 and "127.0.0.1:1" in done.stderr
