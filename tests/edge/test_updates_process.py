"""The real thing on one machine: `outrider-edge run` with a real drafter, a real broker and a runtime in a wheel."""

from __future__ import annotations

import io
import os
import queue
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import msgspec
import pytest

from edge.config import EdgeConfig
from edge.drafters import golden
from edge.drafters import manifest as model_manifest
from edge.loading import load_model
from edge.updates.errors import DigestError, SelfTestError
from edge.updates.manifest import File, ModelRelease, RuntimeRelease
from edge.updates.selftest import SelfTest
from link.config import BrokerConfig, load
from link.mqtt import MqttLink
from protocol.messages import DeviceState, decode, encode
from protocol.topics import device_state_topic, update_topic
from tests.edge.https import Server
from tests.edge.releases import PUBLIC, sha256, sign
from tools.broker import Broker, available, free_port

ROOT = Path(__file__).parents[2]
PROMPT = (1, 2, 3, 4)


def board_file(folder: Path, drafter: Path, port: int, ca: Path | None = None) -> Path:
    path = folder / "edge.toml"
    path.write_text(
        f'[device]\nname = "acme.kitchen"\nstate = "state"\n[broker]\nport = {port}\n[api]\nport = {free_port()}\n'
        f'[drafter]\nmodel = "{drafter}"\nthreads = 1\ncontext = 64\n[updates]\nkeys = ["{PUBLIC}"]\n'
        + (f'ca = "{ca}"\n' if ca else "")
    )
    return path


@pytest.fixture(scope="module")
def drafter(smollm2):
    return smollm2[0]


def release_of(folder: Path) -> ModelRelease:
    files = tuple(
        File(name=p.name, size=p.stat().st_size, sha256=model_manifest.digest(p), url=f"https://x.example/{p.name}")
        for p in sorted(folder.iterdir())
    )
    tokenizer = model_manifest.read(folder, "drafter").tokenizer_digest
    return ModelRelease(release="m", serial=1, channel="stable", files=files, tokenizer_digest=tokenizer)


def copy_of(drafter: Path, folder: Path, changed: str, data: bytes) -> Path:
    """The same model with one file that is another."""
    folder.mkdir()
    for path in drafter.iterdir():
        if path.name != changed:
            (folder / path.name).symlink_to(path)
    (folder / changed).write_bytes(data)
    return folder


def with_golden(drafter: Path, folder: Path, expected: model_manifest.Golden) -> Path:
    facts = msgspec.structs.replace(model_manifest.read(drafter, "drafter"), golden=expected)
    return copy_of(drafter, folder, "manifest.json", msgspec.json.encode(facts))


def test_a_model_is_tested_in_a_process_of_its_own_and_must_guess_what_it_should(drafter, tmp_path):
    path = board_file(tmp_path, drafter, 1)
    config = load(path, EdgeConfig)
    test = SelfTest(path, config, drafter)
    expected = golden.record(load_model(config), PROMPT)
    good = with_golden(drafter, tmp_path / "good", expected)
    test(release_of(good), good)
    ids = list(expected.ids)
    ids[expected.sure[0]] += 1
    bad = with_golden(drafter, tmp_path / "bad", msgspec.structs.replace(expected, ids=tuple(ids)))
    with pytest.raises(SelfTestError, match=r"of the .* guesses in the manifest are others here"):
        test(release_of(bad), bad)
    with pytest.raises(SelfTestError, match=r"no end within 0\.01 s"):
        SelfTest(path, config, drafter, timeout_s=0.01)(release_of(drafter), drafter)


def test_a_model_with_one_byte_changed_does_not_pass(drafter, tmp_path):
    release = release_of(drafter)
    changed = b" " + (drafter / "tokenizer.json").read_bytes()
    copy = copy_of(drafter, tmp_path / "copy", "tokenizer.json", changed)
    path = board_file(tmp_path, drafter, 1)
    with pytest.raises(DigestError, match=r"tokenizer\.json"):
        SelfTest(path, load(path, EdgeConfig), drafter)(release, copy)


def runtime_wheel(version: str, *, broken: bool = False) -> bytes:
    """This checkout as a wheel of another version."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for package in ("protocol", "link", "edge", "native"):
            for path in sorted((ROOT / package).rglob("*")):
                if path.suffix in (".py", ".c", ".h") and not (broken and path.name == "loading.py"):
                    archive.write(path, path.relative_to(ROOT))
        archive.writestr(
            f"outrider-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: outrider\nVersion: {version}\n"
        )
        if broken:
            archive.writestr("edge/loading.py", "raise RuntimeError('this one is broken')\n")
    return made.getvalue()


def runtime(server: Server, version: str, serial: int, data: bytes) -> RuntimeRelease:
    name = f"outrider-{version}-py3-none-any.whl"
    server.files[name] = data
    file = File(name=name, size=len(data), sha256=sha256(data), url=server.url(name))
    return RuntimeRelease(release=f"r-{version}", serial=serial, channel="stable", files=(file,), version=version)


class Watcher:
    """Announces to the board, and reads the state that it retains."""

    def __init__(self, port: int) -> None:
        self.states: queue.Queue[DeviceState] = queue.Queue()
        topic = device_state_topic("acme.kitchen")
        self.link = MqttLink(BrokerConfig(port=port), "watcher", on_message=self._heard, subscriptions=[(topic, 1)])
        self.link.start().wait_up(5.0)

    def _heard(self, topic: str, payload: bytes) -> None:
        message = decode(payload)
        assert isinstance(message, DeviceState)
        self.states.put(message)

    def announce(self, release) -> None:
        self.link.publish(update_topic(release.channel, release.kind), encode(sign(release)), qos=1, retain=True)

    def until(self, says: str, version: str = "", timeout_s: float = 40.0) -> DeviceState:
        deadline, last = time.monotonic() + timeout_s, None
        while (left := deadline - time.monotonic()) > 0:
            try:
                last = self.states.get(timeout=left)
            except queue.Empty:
                break
            if last.status == "online" and says in last.releases and version in last.version:
                return last
        raise AssertionError(f"never said {says!r}: {last}")


@pytest.mark.skipif("mosquitto" not in available(), reason="mosquitto is not installed")
def test_a_board_becomes_another_runtime_between_sessions_and_says_so(drafter, tmp_path):
    good, bad = runtime_wheel("0.9.1"), runtime_wheel("0.9.2", broken=True)
    (tmp_path / "tls").mkdir()
    with Broker.start(kind="mosquitto") as broker, Server(tmp_path / "tls") as server:
        path = board_file(tmp_path, drafter, broker.port, server.ca)
        watcher = Watcher(broker.port)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "edge", "run", "--config", str(path)]
        with open(tmp_path / "log", "wb") as log:
            board = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=log)
        try:
            before = watcher.until("runtime flashed")
            watcher.announce(runtime(server, "0.9.2", 1, bad))
            assert "this one is broken" in watcher.until("rolled back runtime r-0.9.2").releases
            watcher.announce(runtime(server, "0.9.1", 2, good))
            after = watcher.until("runtime r-0.9.1 (on trial)", version="0.9.1")
            assert after.version != before.version
            assert board.poll() is None, "the same process, as its service manager sees it"
        finally:
            board.terminate()
            assert board.wait(20) == 0, (tmp_path / "log").read_text()
            watcher.link.close()
