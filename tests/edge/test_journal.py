"""What a board finds again after it was killed, at any byte."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

import edge.journal
from edge.journal import Entry, Journal
from edge.policy import ChainPolicy
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from protocol.errors import OutriderError
from protocol.messages import Commit, Limits, Opened
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.boards import make_board
from tests.toys import ToyDrafter

ROOT = Path(__file__).parents[2]


def request(session: int = 0xFEDC_BA98_7654_3210, **options) -> Request:
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=(1 << 64) - 1)
    return Request(session, "target-1", (3, 4, 5), sampling, 100, (0, 7), **options)


def only(journal: Journal) -> Entry:
    (entry,) = journal.entries()
    return entry


def test_a_session_is_found_again_as_it_was(tmp_path):
    journal = Journal(tmp_path)
    file = journal.begin(request(patience_s=0.25))
    file.epoch(0)
    file.commit([1, 2])
    file.epoch(3, "v1")
    file.epoch(3)
    file.commit([60])
    file.close()
    entry = only(Journal(tmp_path))
    assert entry == Entry(request(patience_s=0.25), [1, 2, 60], 3, "", "v1")
    assert Journal(tmp_path).unfinished() == [entry]


def test_infinite_patience_survives(tmp_path):
    Journal(tmp_path).begin(request(patience_s=inf)).close()
    assert only(Journal(tmp_path)).request.patience_s == inf


def test_a_complete_session_is_not_gone_on_with(tmp_path):
    journal = Journal(tmp_path)
    file = journal.begin(request())
    file.commit([1])
    file.end("stop")
    assert only(journal).end == "stop" and journal.unfinished() == []
    journal.remove(request().session)
    journal.remove(request().session)
    assert journal.entries() == []


def test_the_oldest_session_comes_first(tmp_path):
    journal = Journal(tmp_path)
    for session, at in ((5, 300), (1, 100), (9, 200)):
        file = journal.begin(request(session))
        os.utime(file.path, (at, at))
    assert [entry.request.session for entry in journal.entries()] == [1, 9, 5]


def test_cut_at_any_byte_it_tells_a_prefix_of_what_was_and_goes_on_from_there(tmp_path):
    journal = Journal(tmp_path)
    file = journal.begin(request())
    header = file.path.stat().st_size
    for ids in ([1, 2, 3], [44], [5, 6]):
        file.commit(ids)
    data = file.path.read_bytes()
    for size in range(header, len(data) + 1):
        file.path.write_bytes(data[:size])
        before = only(journal).committed
        assert before == [1, 2, 3, 44, 5, 6][: len(before)]
        again = journal.resume(request().session)
        again.commit([9, 9])
        again.close()
        assert only(journal).committed == [*before, 9, 9]
    assert before == [1, 2, 3, 44, 5, 6]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\n",
        b"not json\n",
        b'{"version":1',
        b"\0" * 300 + b"\n",
        b'{"version":1,"session":"5","target":"t","prompt":[1],"sampling":{"temperature":99.0},"max_tokens":1,'
        b'"stop_ids":[],"patience_s":0.0}\n',
        b'{"version":1,"session":"xyz","target":"t","prompt":[1],"sampling":{},"max_tokens":1,"stop_ids":[],'
        b'"patience_s":0.0}\n',
    ],
)
def test_a_file_that_cannot_be_read_hides_no_other(tmp_path, content):
    journal = Journal(tmp_path)
    journal.begin(request()).close()
    (tmp_path / "0000000000000005.jsonl").write_bytes(content)
    assert only(journal).request == request()


def test_a_process_killed_in_mid_write_loses_no_line_that_it_finished(tmp_path):
    """The child prints a count only after the commit of that count returned, then writes on until it is shot."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    try:
        count = 0
        while count < 3000:
            count = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
        rest = child.stdout.read().splitlines()
    finally:
        child.kill()
        child.wait()
    sure = max([count, *(int(line) for line in rest if line)])
    committed = only(Journal(tmp_path)).committed
    assert committed == list(range(len(committed)))
    assert len(committed) >= 3 * sure


CHILD = """
import sys
from pathlib import Path
from edge.journal import Journal
from edge.window import Request
from protocol.sampling import Sampling
file = Journal(Path(sys.argv[1])).begin(Request(5, "t", (1,), Sampling(), 10**6))
for i in range(10**6):
    file.commit([3 * i, 3 * i + 1, 3 * i + 2])
    if i % 10 == 9:
        print(i + 1, flush=True)
"""


def test_a_line_that_a_full_disk_takes_half_of_is_an_error(tmp_path):
    """RLIMIT_FSIZE ends a file as a full disk does: a write that no longer fits is cut short without an error."""
    script = "import resource, sys\n" + CHILD.replace(
        "for i", "resource.setrlimit(resource.RLIMIT_FSIZE, (399, 399))\nfor i"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "OSError: [Errno 28] No space left on device" in done.stderr
    committed = only(Journal(tmp_path)).committed
    assert len(committed) > 10 and committed == list(range(len(committed)))
    again = Journal(tmp_path).resume(5)
    again.commit([7])
    assert only(Journal(tmp_path)).committed == [*committed, 7]


def test_a_session_that_cannot_be_written_down_leaves_nothing_half(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Journal(tmp_path).begin(request())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match=r"file/journal: cannot be made.*\[device\]"):
        Journal(tmp_path / "file" / "journal")


def test_only_the_latest_complete_texts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(edge.journal, "KEPT", 3)
    journal = Journal(tmp_path)
    for session in range(1, 7):
        file = journal.begin(request(session))
        os.utime(file.path, (session, session))
        if session != 2:
            file.end("stop")
        file.close()
        os.utime(file.path, (session, session))
    assert [entry.request.session for entry in journal.entries()] == [2, 3, 4, 5, 6]
    journal.begin(request(7)).close()
    assert [entry.request.session for entry in journal.entries()] == [2, 4, 5, 6, 7]


class FullDisk:
    """A journal whose disk fills up after some commits."""

    def __init__(self, commits: int) -> None:
        self.path = Path("full.jsonl")
        self.left = commits
        self.lines = 0
        self.removed = False

    def epoch(self, epoch: int, owner: str = "") -> None:
        pass

    def commit(self, ids) -> None:
        self.lines += 1
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def end(self, reason: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def remove(self) -> None:
        self.removed = True


class Reader:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.over = False

    def verified(self, ids) -> None:
        self.ids.extend(ids)

    def ended(self) -> None:
        self.over = True


def test_a_full_disk_costs_the_journal_and_not_the_text(caplog):
    """What was written stays as long as it is of use: until the text is complete."""
    disk = FullDisk(1)
    reader = Reader()
    window = Window("a.b", Request(5, "t", (3, 4), Sampling(), 4), timing=Timing(), now=0.0)
    run = SessionRun(
        window,
        ToyDrafter(),
        ChainPolicy(),
        publish=lambda send: None,
        listener=reader,
        journal=disk,  # type: ignore[arg-type]
        clock=lambda: 0.0,
    )
    run.begin()
    run.receive(Opened(5, 0, "v", 1, 2, Limits(8, 16, 100, 64)))
    text = [3, 4]
    for id in (10, 11, 12, 13):
        hash = prefix_hashes(owner_hash(5, "v", 0), text)[-1]
        run.receive(Commit(1, 0, len(text), hash, Ids((id,)), finish="length" if id == 13 else ""))
        text.append(id)
        assert disk.removed == (id == 13)
    assert disk.lines == 2, "a line behind a torn one would not be read"
    assert reader.ids == [10, 11, 12, 13] and reader.over
    assert "No space left" in caplog.text


def test_a_board_on_a_full_disk_still_writes_texts(tmp_path, monkeypatch, caplog):
    def full(journal, request):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "begin", full)
    board = make_board(1, "a.b", tmp_path)  # never started: there is no broker
    stream = board.open(request())
    assert stream.run is not None and not stream.run.window.done
    assert f"{tmp_path / 'journal'}: No space left on device" in caplog.text
    board.close()
