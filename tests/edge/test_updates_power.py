"""Power cuts: a board's life is recorded operation by operation, and the power fails after each of them, with and
without each thing that was not synced yet. From every disk that this may leave, the real loader starts a model and a
runtime that pass their test, remembers what it had acknowledged, and the update goes on to its end.
"""

from __future__ import annotations

import random
import shutil

import msgspec
import pytest

from edge.updates import fetch
from edge.updates.plan import Record
from edge.updates.store import Store
from tests.edge.crashes import DiskModel, NoSyncDisk, RecordingDisk, freeze, materialise
from tests.edge.releases import KINDS, Machine, Shelf, flash, settings

ACCEPTANCE = {"m-3": 0.4}  # m-3 drafts badly


class Life:
    """One board's recorded life, as (operations so far, what). saves: records that were acknowledged; announced:
    releases that the broker retained.
    """

    def __init__(self, folder) -> None:
        self.shelf, self.config = Shelf(), flash(folder)
        root = self.config.device.state / "updates"
        root.parent.mkdir()
        self.disk = RecordingDisk(root)
        self.saves: list[tuple[int, Record]] = [(0, Record())]
        self.announced: list[tuple[int, object]] = []
        save = Store.save

        def acknowledged(store: Store, record: Record) -> None:
            save(store, record)
            self.saves.append((len(self.disk.log), record))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "save", acknowledged)
            self._live(Machine(self.config, root, self.shelf, self.disk, ACCEPTANCE))

    def _live(self, board: Machine) -> None:
        for release in (
            self.shelf.model("m-1", 1),
            self.shelf.runtime("1.1", 1),
            self.shelf.model("m-2", 2),
            settings("s-1", 1, patience_s=0.5),
            self.shelf.model("m-3", 3),
            self.shelf.model("m-4", 4),
        ):
            self.announced.append((len(self.disk.log), release))
            board.announce(release)
            board.settle()
        self.end = board.store.record
        self.again = msgspec.structs.replace(self.announced[0][1], release="again", serial=9)

    def acknowledged(self, prefix: int) -> list[Record]:
        """What the board may remember after so many operations: its last save, or the one that it was at."""
        done = [record for at, record in self.saves if at <= prefix]
        return [done[-1], *(record for at, record in self.saves if at > prefix)][:2]

    def retained(self, prefix: int) -> list:
        """The newest announcement of each kind so far."""
        newest = {release.kind: release for at, release in self.announced if at <= prefix}
        return list(newest.values())


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "SYNC_BYTES", 64)
        patch.setattr(fetch, "BLOCK_BYTES", 48)
        yield Life(tmp_path_factory.mktemp("board"))


def active(record: Record) -> list[str | None]:
    return [ref and ref.release for ref in map(record.active, KINDS)]


def test_the_life_that_is_recorded_has_all_that_can_happen(life):
    assert active(life.end) == ["m-4", "1.1", "s-1"]
    assert life.end.model.former is not None and life.end.model.former.release == "m-2"
    assert [r.release for r in life.end.rejected] == ["m-3"]
    kept = {life.end.model.former.digest, life.end.model.committed.digest}
    assert {path.name for path in (life.disk.root / "models").iterdir()} == kept
    assert {op for op, *_ in life.disk.log} >= {"make_directory", "write", "append", "rename", "remove", "sync"}


def test_after_a_power_cut_at_any_point_the_board_starts_and_the_update_goes_on(life, tmp_path):
    model, chance, seen = DiskModel(), random.Random(5), set()
    starts, last = 0, life.announced[-1][0]
    for prefix, operation in enumerate([None, *life.disk.log]):
        if operation is not None:
            model.follow(*operation)
        may_remember, retained = life.acknowledged(prefix), life.retained(prefix)
        for tree in model.after_power_cut(chance):
            key = (freeze(tree), msgspec.json.encode((retained, may_remember)))
            if key in seen:
                continue
            seen.add(key)
            root = tmp_path / "updates"
            materialise(tree, root)
            board = Machine(life.config, root, life.shelf, NoSyncDisk(), ACCEPTANCE)  # asserts what it starts with
            assert board.found in may_remember, f"after {prefix} operations: {active(board.found)}"
            for kind in KINDS:
                if (ref := board.store.record.slot(kind).wanted) is not None:  # it goes on fetching without being told
                    staging, path = board.store.staging(kind, ref.digest), board.store.path(kind, ref.digest)
                    assert board.store.release(path if path.exists() else staging).release == ref.release
            board.announce(*retained)
            board.settle()
            wanted = {release.kind: release.release for release in retained}
            if wanted.get("model") == "m-3":
                wanted["model"] = "m-2"
            assert active(board.store.record) == [wanted.get(kind) for kind in KINDS], f"after {prefix} operations"
            if prefix >= last:  # what was collected, or half collected, can be had again
                board.announce(life.again)
                board.settle()
                assert active(board.store.record)[0] == "again", f"after {prefix} operations"
            starts += 1
            shutil.rmtree(root)
    assert starts > len(life.disk.log)
