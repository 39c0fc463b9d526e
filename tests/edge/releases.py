"""Releases small enough to hold in the hand, a server for them in memory, and a board that takes them."""

from __future__ import annotations

import hashlib
import io
import re
import urllib.error
import urllib.request
import zipfile
from copy import copy
from email.message import Message
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from edge.drafters import manifest as model_manifest
from edge.session import Tally
from edge.updates.boot import Boot
from edge.updates.config import UpdatesConfig
from edge.updates.disk import Disk
from edge.updates.errors import DigestError, SelfTestError
from edge.updates.fetch import HttpsFetcher
from edge.updates.judge import Rule
from edge.updates.manifest import (
    AnyRelease,
    Facts,
    File,
    ModelRelease,
    RuntimeRelease,
    SettingsRelease,
)
from edge.updates.selftest import check_files
from edge.updates.settings import Settings, apply
from edge.updates.store import Store
from edge.updates.updater import Updater
from edge.updates.wheels import SITE
from protocol.messages import Announcement

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
TOKENIZER = b'{"tokens": []}'
TOKENIZER_DIGEST = hashlib.sha256(TOKENIZER).hexdigest()
FACTS = Facts("acme.kitchen", "raspberry-pi-5", "stable", "0.1.0", TOKENIZER_DIGEST)
RULE = Rule(rounds=20, most=3)


def sign(release: AnyRelease, key: Ed25519PrivateKey = KEY) -> Announcement:
    manifest = msgspec.json.encode(release)
    return Announcement(manifest, key.sign(manifest))


def model_files(name: str, size: int = 150) -> dict[str, bytes]:
    """A directory that `edge.drafters.manifest.read` takes, of a model that nobody can run."""
    weights = {"model.onnx": f"graph of {name}".encode(), "model.onnx.data": (name.encode() * size)[:size]}
    facts = model_manifest.Manifest(
        kind="drafter", name=name, architecture="none", source={}, weights_digest=sha256(b"".join(weights.values())),
        tokenizer_digest=TOKENIZER_DIGEST, vocab_size=64, context=64, dtype="float32", stop_ids=(0,), chat_template="",
    )  # fmt: skip
    return {**weights, "tokenizer.json": TOKENIZER, "manifest.json": msgspec.json.encode(facts)}


def wheel(name: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(zipfile.ZipInfo("edge/__init__.py"), f"NAME = {name!r}\n")
        archive.writestr(zipfile.ZipInfo("outrider.dist-info/METADATA"), f"Name: outrider\nVersion: {name}\n")
    return made.getvalue()


_FETCHER = HttpsFetcher()


class Shelf:
    """What the server has, by URL, and the releases that it is for. Opens requests as urllib's opener does."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []

    def put(self, release: str, files: dict[str, bytes]) -> tuple[File, ...]:
        made = []
        for name, data in files.items():
            url = f"https://releases.example/{release}/{name}"
            self.files[url] = data
            made.append(File(name=name, size=len(data), sha256=sha256(data), url=url))
        return tuple(made)

    def model(self, release: str, serial: int, **more) -> ModelRelease:
        files = self.put(release, model_files(release))
        more = {"channel": "stable", "tokenizer_digest": TOKENIZER_DIGEST, **more}
        return ModelRelease(release=release, serial=serial, files=files, **more)

    def runtime(self, release: str, serial: int, **more) -> RuntimeRelease:
        files = self.put(release, {f"outrider-{release}-py3-none-any.whl": wheel(release)})
        return RuntimeRelease(release=release, serial=serial, files=files, version=release, channel="stable", **more)

    def open(self, request: urllib.request.Request, timeout: float) -> Reply:
        data, asked = self.files.get(request.full_url), request.get_header("Range")
        self.asked.append((request.full_url, asked))
        if data is None:
            raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)
        start = int(re.findall(r"\d+", asked)[0]) if asked else 0
        return Reply(data[start:], start if asked else None, len(data))

    def fetcher(self) -> HttpsFetcher:
        """The real one in all but its socket, with no memory of an earlier process."""
        made = copy(_FETCHER)
        made._opener, made._synced = self, {}  # type: ignore[assignment]
        return made


class Reply(io.BytesIO):
    def __init__(self, data: bytes, start: int | None, size: int) -> None:
        super().__init__(data)
        self.status, self.headers = 200 if start is None else 206, Message()
        if start is not None:
            self.headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"


def settings(release: str, serial: int, **fields) -> SettingsRelease:
    return SettingsRelease(release=release, serial=serial, channel="stable", settings=Settings(**fields))


def flash(folder: Path) -> EdgeConfig:
    """A board's file and the model that it was flashed with; its state is below."""
    model = folder / "flashed"
    model.mkdir(parents=True)
    for name, data in model_files("flashed").items():
        (model / name).write_bytes(data)
    return EdgeConfig(
        device=DeviceConfig(name=FACTS.device, state=folder / "state"),
        drafter=DrafterConfig(model=model),
        updates=UpdatesConfig(keys=(PUBLIC,)),
    )


def read_model(config: EdgeConfig) -> model_manifest.Manifest:
    """As the board's loader, which then hands the files to ONNX Runtime: every digest is checked."""
    return model_manifest.read(config.drafter.model, "drafter", verify=True)


class Machine:
    """A board without a drafter: it boots, takes what is announced, and `talks` as well as its model is said to.

    acceptance: of a release by its name, .8 when absent; restarts: how often it has replaced itself.
    """

    def __init__(
        self, config: EdgeConfig, root: Path, shelf: Shelf, disk: Disk, acceptance: dict[str, float] | None = None
    ) -> None:
        self.config, self.shelf, self.disk, self.acceptance = config, shelf, disk, acceptance or {}
        self.root, self.now, self.restarts, self.busy = root, 1e9, 0, False
        self.start()

    def start(self) -> None:
        """What `outrider-edge run` does first."""
        self.store = Store(self.root, (PUBLIC,), self.disk).open()
        self.found = self.store.record
        self.boot = Boot(self.config, self.store, now=self.now, environ={})
        runtime = self.boot.active("runtime")
        if runtime is not None:
            check_site(self.store.path("runtime", runtime.digest))
        self.running, self.model = self.boot.load(read_model)
        self.restarting = False
        self.updater = Updater(
            self.store, FACTS, RULE, fetcher=self.shelf.fetcher(), test=self.test, idle=lambda: not self.busy,
            restart=self._restart, clock=lambda: self.now,
        )  # fmt: skip

    def _restart(self) -> None:
        assert not self.restarting, "told twice"
        self.restarting = True

    def test(self, release: AnyRelease, folder: Path) -> None:
        check_files(release, folder)
        match release:
            case SettingsRelease():
                apply(self.config, release.settings)
            case RuntimeRelease():
                check_site(folder)
            case _:
                model_manifest.read(folder, "drafter", verify=True)

    def announce(self, *releases: AnyRelease) -> None:
        for release in releases:
            self.updater.announced(sign(release))

    def work(self) -> None:
        """Do what is to do, restarts included, without a session in between."""
        while self.updater.step():
            if self.restarting:
                assert not self.updater.step()
                self.restarts += 1
                self.start()

    def talk(self, rounds: int = 30) -> None:
        """One session, and what it leads to."""
        active = [self.boot.active(kind) for kind in ("model", "runtime", "settings")]
        share = min([self.acceptance.get(ref.release, 0.8) for ref in active if ref is not None], default=0.8)
        hits = round(rounds * 20 * share)
        self.updater.ended(Tally(commits=rounds, guessed=hits, missed=rounds * 20 - hits))
        self.work()

    def settle(self) -> None:
        """Work and talk until nothing changes any more."""
        for _ in range(60):
            self.work()
            record = self.store.record
            if record.trial is None and not any(record.slot(k).wanted or record.slot(k).candidate for k in KINDS):
                return
            self.talk()
        raise AssertionError(f"the board never settles: {record}")


KINDS = ("model", "runtime", "settings")


def check_site(folder: Path) -> None:
    """A runtime's own test here: everything that is in its wheels lies unpacked."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SelfTestError("no wheel", where=str(folder))
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if (folder / SITE / member.filename).read_bytes() != archive.read(member):
                    raise DigestError(f"{member.filename} is not the wheel's", where=str(path))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
