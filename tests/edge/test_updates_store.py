"""The store, the loader and the updater on a real disk: what goes wrong without a power cut."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge.updates.boot import RUNTIME, Boot, begin, flashed_environment
from edge.updates.disk import PosixDisk
from edge.updates.errors import StoreError
from edge.updates.plan import MAX_STARTS
from edge.updates.store import RECORD, Store
from edge.updates.wheels import SITE
from tests.edge.crashes import NoSyncDisk
from tests.edge.releases import PUBLIC, Machine, Shelf, flash, read_model, settings, sign


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def board(tmp_path, shelf):
    config = flash(tmp_path)
    return Machine(config, config.device.state / "updates", shelf, PosixDisk(), {"bad": 0.3})


def test_a_model_and_a_runtime_are_taken_and_run(board, shelf):
    board.announce(shelf.model("m-1", 1), shelf.runtime("1.1", 1), settings("s-1", 1, patience_s=0.5))
    board.settle()
    assert board.model.name == "m-1" and board.running.session.patience_s == 0.5
    site, environ = board.boot.runtime()
    assert (site / "edge/__init__.py").read_text() == "NAME = '1.1'\n"
    assert environ["PYTHONPATH"] == str(site) and environ[RUNTIME] == site.parent.name
    assert RUNTIME not in flashed_environment(environ) and "PYTHONPATH" not in flashed_environment(environ)
    assert board.restarts == 3


def test_a_bad_model_is_rolled_back_and_its_files_are_collected(board, shelf):
    board.announce(shelf.model("m-1", 1))
    board.settle()
    board.talk(100)
    board.announce(shelf.model("bad", 2))
    board.work()
    assert board.model.name == "bad"
    board.settle()
    assert board.model.name == "m-1"
    assert len(list((board.root / "models").iterdir())) == 1


def test_going_back_by_hand_to_the_former_model_fetches_nothing(board, shelf):
    first = shelf.model("m-1", 1)
    board.announce(first)
    board.settle()
    board.announce(shelf.model("m-2", 2))
    board.settle()
    asked = len(shelf.asked)
    board.announce(msgspec.structs.replace(first, release="m-1-back", serial=3))
    board.settle()
    assert board.model.name == "m-1" and len(shelf.asked) == asked


def test_a_release_that_is_not_what_was_signed_never_runs(board, shelf):
    release = shelf.model("m-1", 1)
    shelf.files[release.files[1].url] = b"x" * release.files[1].size
    board.announce(release)
    board.settle()
    assert board.model.name == "flashed" and board.restarts == 0
    assert "is not what the manifest says" in board.store.record.rejected[0].why


def test_a_session_is_never_cut_for_a_switch(board, shelf):
    board.busy = True
    board.announce(shelf.model("m-1", 1))
    board.work()
    assert board.store.record.model.candidate is not None and board.restarts == 0
    board.busy = False
    board.work()
    assert board.restarts == 1 and board.model.name == "m-1"


def test_a_server_that_fails_is_asked_again_later(board, shelf):
    release = shelf.model("m-1", 1)
    lost = shelf.files.pop(release.files[0].url)
    board.announce(release)
    board.work()
    shelf.files[release.files[0].url] = lost
    board.work()
    assert board.store.record.model.wanted is not None
    board.now += 31
    board.settle()
    assert board.model.name == "m-1"


def test_the_months_cap_puts_a_download_off_to_the_next_month(board, shelf):
    board.updater._data_cap_mb = 0
    board.announce(shelf.model("m-1", 1))
    board.work()
    assert board.store.record.model.wanted is not None and not shelf.asked
    board.updater._data_cap_mb = 1
    board.now += 3600
    board.settle()
    assert board.model.name == "m-1"
    assert board.store.record.usage.bytes == sum(file.size for file in shelf.model("m-1", 1).files)


def test_what_sessions_take_of_the_months_cap_is_left_to_them(board, shelf):
    moved = 1_000_000
    board.updater._moved = lambda: moved
    board.updater._data_cap_mb = 1
    board.talk()
    board.announce(shelf.model("m-1", 1))
    board.work()
    assert board.store.record.usage.bytes == moved and not shelf.asked
    moved += 50
    board.talk()
    assert board.store.record.usage.bytes == moved, "what was counted is not counted again"
    board.now += 32 * 24 * 3600
    board.settle()
    assert board.model.name == "m-1"


def test_a_full_disk_leaves_what_runs_and_the_rest_comes_when_there_is_room(tmp_path, shelf):
    class FullDisk(NoSyncDisk):
        full = True

        def append(self, path: Path, data: bytes) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            super().append(path, data)

    config, disk = flash(tmp_path), FullDisk()
    board = Machine(config, config.device.state / "updates", shelf, disk)
    board.announce(shelf.model("m-1", 1))
    board.work()
    assert board.model.name == "flashed" and board.store.record.model.wanted is not None
    disk.full = False
    board.now += 31
    board.settle()
    assert board.model.name == "m-1"


def test_a_release_that_is_removed_only_in_part_has_lost_its_name(tmp_path, shelf):
    class BrokenDisk(NoSyncDisk):
        left = 10**9

        def remove(self, path: Path) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "Input/output error", str(path))
            super().remove(path)

    config, disk = flash(tmp_path), BrokenDisk()
    board = Machine(config, config.device.state / "updates", shelf, disk)
    first = shelf.model("m-1", 1)
    board.announce(first)
    board.settle()
    name = board.store.record.model.committed.digest
    board.announce(shelf.model("m-2", 2))
    board.settle()
    disk.left = 2
    board.announce(shelf.model("m-3", 3))
    with pytest.raises(StoreError, match="Input/output error"):
        board.settle()
    assert not board.store.path("model", name).exists()
    disk.left = 10**9
    board.announce(msgspec.structs.replace(first, release="m-1-back", serial=4))
    board.settle()
    assert board.model.name == "m-1"


def committed(board, shelf, *names: str) -> None:
    for serial, name in enumerate(names, 1):
        board.announce(shelf.model(name, serial))
        board.settle()


def test_files_that_rot_are_found_and_the_former_model_runs(board, shelf):
    committed(board, shelf, "m-1", "m-2")
    (board.root / "models" / board.store.record.model.committed.digest / "model.onnx").write_bytes(b"")
    board.start()
    assert board.model.name == "m-1"


def test_a_model_that_does_not_load_costs_its_place_not_the_board(board, shelf):
    committed(board, shelf, "m-1", "m-2")

    def load(config):
        if (found := read_model(config)).name == "m-2":
            (config.drafter.model / "tokenizer.json").write_bytes(b"{}")
        return read_model(config) if found.name == "m-2" else found

    _, model = Boot(board.config, board.store, environ={}).load(load)
    assert model.name == "m-1" and board.store.record.model.committed.release == "m-1"


def test_a_runtime_that_crashes_before_it_can_say_so_is_given_up_by_the_flashed_one(board, shelf):
    board.announce(shelf.runtime("1.1", 1))
    board.work()
    for _ in range(MAX_STARTS - 1):
        assert Boot(board.config, board.store, environ={}).runtime() is not None
    assert Boot(board.config, board.store, environ={}).runtime() is None
    assert board.store.record.rejected[0].release == "1.1"


def test_the_runtime_itself_does_not_count_the_start_again(board, shelf):
    board.announce(shelf.runtime("1.1", 1))
    board.work()
    starts = board.store.record.trial.starts
    digest = board.store.record.trial.ref.digest
    boot = Boot(board.config, board.store, environ={RUNTIME: digest, "PYTHONPATH": f"/x/{digest}/{SITE}"})
    assert boot.runtime() is None and board.store.record.trial.starts == starts


def test_a_record_that_cannot_be_read_starts_what_was_flashed(board, shelf, caplog):
    committed(board, shelf, "m-1")
    (board.root / RECORD).write_bytes(b"\0" * 64)
    assert begin(board.config) is None
    assert "Remove it to begin with what was flashed" in caplog.text
    with pytest.raises(StoreError):
        Store(board.root, (PUBLIC,)).open()


def test_a_board_without_the_section_takes_no_updates(board):
    assert begin(msgspec.structs.replace(board.config, updates=None)) is None


def test_a_release_outlives_its_key_once_it_was_announced_under_the_next(board, shelf):
    committed(board, shelf, "m-1")
    following = Ed25519PrivateKey.from_private_bytes(bytes(32))
    keys = (following.public_key().public_bytes_raw().hex(),)
    board.store.keys = (PUBLIC, *keys)
    board.updater.announced(sign(shelf.model("m-1", 2), following))
    board.work()
    assert Boot(board.config, Store(board.root, keys).open(), environ={}).active("model") is not None


def test_a_key_that_was_revoked_takes_its_releases_along(board, shelf):
    committed(board, shelf, "m-1")
    store = Store(board.root, ("0" * 64,)).open()
    assert Boot(board.config, store, environ={}).active("model") is None
