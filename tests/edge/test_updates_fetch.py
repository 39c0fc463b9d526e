"""Files over real HTTPS on loopback: broken off, resumed, redirected, wrong, and under a certificate of nobody's."""

from __future__ import annotations

import hashlib
import random

import pytest

from edge.updates import fetch
from edge.updates.errors import DataCapError, DigestError, FetchError
from edge.updates.fetch import HttpsFetcher
from edge.updates.manifest import File
from tests.edge.crashes import NoSyncDisk
from tests.edge.https import Server

DATA = random.Random(1).randbytes(300_000)
NAME = "model.onnx.data"


def signed(server: Server, data: bytes = DATA) -> File:
    """What the manifest says of the file, whatever the server has."""
    return File(name=NAME, size=len(data), sha256=hashlib.sha256(data).hexdigest(), url=server.url(NAME))


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SYNC_BYTES", 64 << 10)
    monkeypatch.setattr(fetch, "BLOCK_BYTES", 16 << 10)
    (tmp_path / "tls").mkdir()
    (tmp_path / "in").mkdir()
    with Server(tmp_path / "tls") as server:
        server.files[NAME] = DATA
        yield server


@pytest.fixture
def get(server, tmp_path):
    fetcher = HttpsFetcher(tmp_path / "tls/ca.pem", timeout_s=5.0)

    def get(file: File | None = None, *, budget=None, more=lambda num: True, fetcher=fetcher) -> bytes:
        fetcher.fetch(NoSyncDisk(), file or signed(server), tmp_path / "in", budget=budget, more=more)
        (path,) = (tmp_path / "in").iterdir()
        return path.read_bytes()

    return get


def test_a_file_comes_whole(server, get, tmp_path):
    came = []
    assert get(more=lambda num: came.append(num) or True) == DATA
    assert sum(came) == len(DATA)


def test_what_breaks_off_is_resumed_where_it_broke_off(server, get):
    server.cut = 200_001
    with pytest.raises(FetchError, match=r"ended after 200001 of 300000|IncompleteRead"):
        get()
    came = []
    assert get(more=lambda num: came.append(num) or True) == DATA
    assert server.asked == [None, f"bytes={300_000 - sum(came)}-"] and sum(came) < 120_000


def test_after_a_power_cut_only_what_was_synced_is_trusted(server, get, tmp_path):
    sound = 3 * (64 << 10)
    (tmp_path / "in/model.onnx.data.part").write_bytes(DATA[:sound] + bytes(5000))
    assert get() == DATA
    assert server.asked == [f"bytes={sound}-"]


def test_a_part_that_is_something_else_is_fetched_once_more_from_its_beginning(server, get, tmp_path):
    (tmp_path / "in/model.onnx.data.part").write_bytes(bytes(100_000))
    assert get() == DATA
    assert server.asked == ["bytes=65536-", None]


def test_a_server_that_cannot_resume_sends_it_all_again(server, get, tmp_path):
    (tmp_path / "in/model.onnx.data.part").write_bytes(DATA[:100_000])
    server.resumes = False
    assert get() == DATA


def test_a_wrong_file_is_refused_and_nothing_of_it_kept(server, get, tmp_path):
    server.files[NAME] = DATA[:-1] + b"x"
    with pytest.raises(DigestError):
        get()
    assert (tmp_path / "in/model.onnx.data.part").stat().st_size == 0


def test_a_longer_file_is_not_read_beyond_its_size(server, get):
    came = []
    with pytest.raises(DigestError):
        get(signed(server, DATA[:1000] + b"?"), more=lambda num: came.append(num) or True)
    assert sum(came) == 1001


@pytest.mark.parametrize("status", [404, 416, 503])
def test_a_server_that_refuses_is_named_with_its_reason(server, get, status):
    server.status = status
    with pytest.raises(FetchError, match=f"HTTP {status}"):
        get()


def test_nobody_leads_it_off_https(server, get):
    server.moved = "http://127.0.0.1:9/plain"
    with pytest.raises(FetchError, match="not https"):
        get()


def test_a_certificate_of_nobodys_is_refused(server, get):
    with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
        get(fetcher=HttpsFetcher())
    assert server.asked == []


def test_a_cap_is_looked_at_before_a_byte_is_asked_for(server, get):
    with pytest.raises(DataCapError, match="300000 bytes are to come, 299999 are left"):
        get(budget=299_999)
    assert server.asked == []
    assert get(budget=300_000) == DATA


def test_it_can_be_put_off_in_the_middle_and_nothing_is_lost(server, get):
    with pytest.raises(FetchError, match="put off after 16384"):
        get(more=lambda num: False)
    came = []
    assert get(more=lambda num: came.append(num) or True) == DATA
    assert sum(came) == len(DATA) - 16384
