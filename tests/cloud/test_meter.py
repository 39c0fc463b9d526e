"""The meter's files: whatever a crash, a copy or a full disk does to them, each token is billed once."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cloud.meter
from cloud.ledger import Ledger
from cloud.meter import Meter
from cloud.records import Records, RecordsError
from cloud.usage_report import Account, bill, report
from protocol.sampling import Sampling
from tests.cloud.ledgers import PROMPT, grow, make_ledger
from tests.toys import TARGET

NOON = 1_795_953_600.0  # 2026-11-29 12:00 UTC


class Clock:
    def __init__(self, at: float = NOON) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def accounts(*directories: Path, day: str = "") -> dict[str, Account]:
    found = bill(Records.read(directories, until=day).last.values(), day)
    return {device: account for (device, _), account in found.items()}


def whole(meter: Meter, *ledgers: Ledger) -> None:
    """The meter's run comes to its proper end."""
    for ledger in ledgers:
        meter.closed(ledger)
    meter.close()


def wait_for(what, limit_s: float = 5.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


def written(meter: Meter) -> None:
    """What was put is written, or has failed: the batch behind it was taken."""
    meter.writer.put([])
    wait_for(lambda: not meter.writer._work)
    meter.writer.put([])
    wait_for(lambda: not meter.writer._work)


def test_what_was_committed_is_billed_by_device_with_its_rows(tmp_path):
    meter = Meter(tmp_path, "v1", TARGET, flush_s=0.0)
    a, b = make_ledger(1), make_ledger(2, device="acme.b")
    meter.opened(a)
    meter.opened(b)
    for now in range(5):
        grow(a, 10)
        grow(b, 3)
        meter.flush([a, b], now)
    a.usage.draft_rows, a.usage.accepted, a.usage.engine_s = 7, 4, 0.25
    whole(meter, a, b)
    found = accounts(tmp_path)
    assert found["acme.a"].tokens == 50 and found["acme.b"].tokens == 15
    assert (found["acme.a"].root_rows, found["acme.a"].draft_rows, found["acme.a"].accepted) == (50, 7, 4)
    assert found["acme.a"].bytes_out == 1000 and found["acme.a"].engine_s == 0.25
    assert found["acme.a"].sessions == 1 and found["acme.a"].prompt_tokens == len(PROMPT)
    assert found["acme.a"].gap_tokens == found["acme.a"].again_tokens == 0


def test_a_line_is_written_at_most_flush_s_after_the_last(tmp_path):
    meter = Meter(tmp_path, "v1", TARGET, flush_s=5.0)
    ledger = make_ledger(1)
    meter.opened(ledger)
    seen = []
    for now in range(100, 121):
        grow(ledger, 1)
        meter.flush([ledger], now)
        written(meter)
        seen.append(accounts(tmp_path)["acme.a"].tokens)
    assert all(tokens >= i + 1 - 5 for i, tokens in enumerate(seen))
    lines = next(tmp_path.iterdir()).read_bytes().split()
    assert len(lines) == 5, "a line for every flush, not for every second"
    meter.close()


def test_what_two_verifiers_drew_is_billed_once(tmp_path):
    """The first died after it committed 40, of which the device had heard 30."""
    first, second = Meter(tmp_path, "v1", TARGET, flush_s=0.0), Meter(tmp_path, "v2", TARGET, flush_s=0.0)
    dead = make_ledger(1)
    first.opened(dead)
    grow(dead, 40)
    first.flush([dead], 1.0)
    first.writer.close()  # as if shot here
    heir = make_ledger(1, have=tuple(dead.text[len(PROMPT) :][:30]))
    second.opened(heir)
    grow(heir, 70)
    whole(second, heir)
    account = accounts(tmp_path)["acme.a"]
    assert account.tokens == 100 and account.again_tokens == 10 and account.gap_tokens == 0
    assert account.root_rows == 110, "rows were computed twice, and cost twice"
    assert account.sessions == 1 and account.prompt_tokens == len(PROMPT)


def test_a_gap_that_a_crash_left_is_billed_where_a_verifier_went_on_behind_it(tmp_path):
    first, second = Meter(tmp_path, "v1", TARGET, flush_s=9.0), Meter(tmp_path, "v2", TARGET, flush_s=0.0)
    dead = make_ledger(1)
    first.opened(dead)
    grow(dead, 20)
    first.flush([dead], 1.0)
    grow(dead, 30)
    first.flush([dead], 2.0)  # too soon for a line
    first.writer.close()
    heir = make_ledger(1, have=tuple(dead.text[len(PROMPT) :]))
    second.opened(heir)
    grow(heir, 25)
    whole(second, heir)
    account = accounts(tmp_path)["acme.a"]
    assert account.tokens == 75 and account.gap_tokens == 30 and account.root_rows == 45


def test_a_claim_that_nobody_went_on_from_is_not_billed(tmp_path):
    meter = Meter(tmp_path, "v1", TARGET)
    ledger = make_ledger(1, have=(9,) * 500)
    ledger.usage.bytes_in = 1200
    meter.opened(ledger)
    whole(meter, ledger)
    assert accounts(tmp_path)["acme.a"].tokens == 0 and accounts(tmp_path)["acme.a"].bytes_in == 1200


def test_another_text_under_the_same_session_is_billed_for_itself(tmp_path):
    """A device must not get its second text for nothing by calling it by the first one's name."""
    meter = Meter(tmp_path, "v1", TARGET)
    for sampling in (Sampling(), Sampling(temperature=0.5, seed=1), Sampling(temperature=0.5, seed=2)):
        ledger = make_ledger(1, sampling=sampling)
        meter.opened(ledger)
        grow(ledger, 40)
        meter.closed(ledger)
    meter.close()
    account = accounts(tmp_path)["acme.a"]
    assert account.tokens == 120 and account.sessions == 3


def test_each_day_has_its_own_and_the_days_add_up(tmp_path):
    clock = Clock(NOON + 11.999 * 3600)  # 3.6 s before midnight
    meter = Meter(tmp_path, "v1", TARGET, flush_s=2.0, wall=clock)
    ledger = make_ledger(1)
    meter.opened(ledger)
    for now in range(10):
        grow(ledger, 10)
        meter.flush([ledger], now)
        clock.at += 1.0
    whole(meter, ledger)
    days = [accounts(tmp_path, day=day)["acme.a"] for day in ("2026-11-29", "2026-11-30")]
    assert [day.tokens for day in days] == [50, 50]
    assert [day.root_rows for day in days] == [50, 50] and [day.sessions for day in days] == [1, 0]
    assert sorted(path.name[:10] for path in tmp_path.iterdir()) == ["2026-11-29", "2026-11-30"]
    assert accounts(tmp_path, day="2026-11")["acme.a"].tokens == 100
    assert not accounts(tmp_path, day="2026-12")


def test_a_clock_that_jumps_about_loses_and_doubles_nothing(tmp_path):
    clock = Clock()
    meter = Meter(tmp_path, "v1", TARGET, flush_s=0.0, wall=clock)
    ledger = make_ledger(1)
    meter.opened(ledger)
    for now, jump in enumerate([0, -3600, 13 * 3600, -14 * 3600, -9 * 365 * 86_400, 9 * 365 * 86_400]):
        clock.at += jump
        grow(ledger, 10)
        meter.flush([ledger], now)
    whole(meter, ledger)
    account = accounts(tmp_path)["acme.a"]
    assert account.tokens == account.root_rows == 60
    # A day that is charged before the one that went before it shows a gap, which that one's lines then fill.
    assert account.gap_tokens == account.again_tokens


def test_a_full_file_is_followed_by_the_next(tmp_path):
    meter = Meter(tmp_path, "v1", TARGET, flush_s=0.0, most_bytes=2000)
    ledger = make_ledger(1)
    meter.opened(ledger)
    for now in range(30):
        grow(ledger, 2)
        meter.flush([ledger], now)
        written(meter)
    whole(meter, ledger)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2 and max(path.stat().st_size for path in files) < 4000
    assert accounts(tmp_path)["acme.a"].tokens == 60
    sizes = [sum(account.root_rows for account in accounts_of_file(path)) for path in files]
    assert sum(sizes) == 60 and min(sizes) > 0, "each file says what happened while it was written"


def accounts_of_file(path: Path) -> list[Account]:
    records = Records()
    list(records.add(path.read_bytes()))
    return list(bill(records.last.values()).values())


class TestToday:
    def test_it_counts_own_sessions_and_those_of_others_in_the_directory(self, tmp_path):
        clock = Clock()
        one = Meter(tmp_path, "v1", TARGET, flush_s=0.0, wall=clock)
        two = Meter(tmp_path, "v2", TARGET, flush_s=0.0, wall=clock)
        a, b, other = make_ledger(1), make_ledger(2), make_ledger(3, device="umbrella.x")
        for meter, ledger in ((one, a), (one, other), (two, b)):
            meter.opened(ledger)
        grow(a, 10)
        grow(b, 7)
        grow(other, 3)
        one.flush([a, other], 1.0)
        two.flush([b], 1.0)
        assert one.today("acme") >= 10 and one.today("umbrella") == 3
        wait_for(lambda: one.flush([a, other], 2.0) or one.today("acme") == 17)
        wait_for(lambda: two.flush([b], 2.0) or two.today("acme") == 17)
        grow(b, 5)
        two.flush([b], 9.0)
        wait_for(lambda: one.flush([a, other], 9.0) or one.today("acme") == 22)
        clock.at += 12.5 * 3600
        assert one.today("acme") == 0 and one.left_s() == pytest.approx(23.5 * 3600)
        one.flush([a, other], 10.0)
        grow(a, 2)
        one.flush([a, other], 11.0)
        assert one.today("acme") == 2
        whole(one)
        whole(two)

    def test_a_restart_knows_what_the_runs_before_it_committed(self, tmp_path):
        clock = Clock()
        first = Meter(tmp_path, "v1", TARGET, flush_s=0.0, wall=clock)
        ledger = make_ledger(1)
        first.opened(ledger)
        grow(ledger, 33)
        first.flush([ledger], 1.0)
        first.writer.close()
        (file,) = tmp_path.iterdir()
        with file.open("ab") as torn:
            torn.write(file.read_bytes().split(b"\n")[1][:50])
        second = Meter(tmp_path, "v1", TARGET, wall=clock)
        assert second.today("acme") == 33
        second.close()


class TestAFullDisk:
    def test_serving_goes_on_and_the_record_is_whole_once_there_is_room(self, tmp_path, monkeypatch, caplog):
        meter = Meter(tmp_path, "v1", TARGET, flush_s=0.0)
        ledger = make_ledger(1)
        meter.opened(ledger)
        grow(ledger, 10)
        meter.flush([ledger], 1.0)
        written(meter)
        real, room = os.write, 150

        def full(fd: int, data: bytes) -> int:
            nonlocal room
            if not room:
                raise OSError(28, "No space left on device")
            written = real(fd, data[:room])
            room -= written
            return written

        monkeypatch.setattr(cloud.meter.os, "write", full)
        with caplog.at_level(logging.ERROR, "cloud.meter"):
            for now in range(2, 8):
                grow(ledger, 10)
                meter.flush([ledger], now)
                written(meter)
        wait_for(lambda: meter.writer.errors >= 5)
        said = [record for record in caplog.records if record.name == "cloud.meter"]
        assert len(said) == 1 and "No space left" in said[0].getMessage(), "told once, not every second"
        monkeypatch.setattr(cloud.meter.os, "write", real)
        whole(meter, ledger)
        assert accounts(tmp_path)["acme.a"].tokens == 70 and meter.writer.lost == 0
        assert Records.read([tmp_path]).unreadable == 1, "the line that the disk cut short"

    def test_what_could_never_be_written_is_counted(self, tmp_path, monkeypatch):
        meter = Meter(tmp_path, "v1", TARGET, flush_s=0.0)

        def full(fd: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cloud.meter.os, "write", full)
        ledger = make_ledger(1)
        meter.opened(ledger)
        grow(ledger, 10)
        whole(meter, ledger)
        assert meter.writer.lost == 1

    def test_a_directory_that_cannot_be_written_is_named_at_the_start(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(RecordsError, match=r"file.*\[metering\] directory"):
            Meter(tmp_path / "file" / "usage", "v1", TARGET)


def test_reading_what_is_not_there_names_it(tmp_path):
    with pytest.raises(RecordsError, match="no such directory"):
        Records.read([tmp_path / "none"])


def test_garbage_in_a_file_is_counted_and_skipped(tmp_path):
    (tmp_path / "2026-11-29-x-0-0000.jsonl").write_bytes(
        b"\n{}\n[]\nnull\n\xff\xfe\n" + b"\0" * 4096 + b"\n" + b"{" * 99
    )
    found = report(Records.read([tmp_path]))
    assert found["accounts"] == [] and found["unreadable_lines"] == 6


# What a day may do: a step of so many tokens, a flush, or the owner is shot and another verifier goes on from what the
# device has heard; the file of the dead one may be cut at any byte.
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 6)),
    st.tuples(st.just("step"), st.just(0), st.integers(1, 6)),
    st.tuples(st.just("flush"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(st.just("flush"), st.just(0), st.integers(3, 9)),
    st.tuples(st.just("shoot"), st.integers(0, 1), st.integers(0, 4)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS, min_size=8, max_size=30), st.lists(st.floats(0, 1), min_size=30, max_size=30), st.randoms())
def test_crashes_copies_and_torn_files_never_bill_too_much_or_too_little(events, cuts, random):
    with tempfile.TemporaryDirectory() as folder:
        day_of_crashes(Path(folder), events, iter(cuts), random)


def day_of_crashes(folder: Path, events, cuts, random) -> None:
    """Two sessions, each at a verifier of its own at any time."""
    here = folder / "usage"
    dead: list[Meter] = []
    meters = [Meter(here, f"v{i}", TARGET, flush_s=3.0) for i in range(2)]
    ledgers = [make_ledger(10 + i, device=f"acme.{i}") for i in range(2)]
    rows, farthest, nows = [0, 0], [0, 0], itertools.count(1)
    for meter, ledger in zip(meters, ledgers, strict=True):
        meter.opened(ledger)
    for what, i, n in events:
        if what == "step":
            grow(ledgers[i], n)
            rows[i] += n
            farthest[i] = max(farthest[i], ledgers[i].frontier - len(PROMPT))
        elif what == "flush":
            meters[i].flush([ledgers[i]], next(nows) + n)
            written(meters[i])
        else:
            meters[i].writer.close()
            dead.append(meters[i])
            heard = max(0, ledgers[i].frontier - len(PROMPT) - n)
            have = tuple(ledgers[i].text[len(PROMPT) :][:heard])
            meters[i], ledgers[i] = Meter(here, f"v{i}", TARGET, flush_s=3.0), make_ledger(10 + i, have, f"acme.{i}")
            meters[i].opened(ledgers[i])
    for meter, ledger in zip(meters, ledgers, strict=True):
        whole(meter, ledger)
    for meter in dead:
        for path in here.glob(f"*-{meter.run}-*"):
            os.truncate(path, int(next(cuts, 1.0) * path.stat().st_size))

    found = accounts(here)
    intact: dict[str, dict[tuple, dict]] = defaultdict(dict)
    for path in here.iterdir():
        for piece in path.read_bytes().split(b"\n"):
            if piece.endswith(b"}"):
                line = json.loads(piece)
                intact[line["device"]][line["run"], line["file"], line["opening"]] = line
    for i in range(2):
        lines, account = intact[f"acme.{i}"].values(), found.get(f"acme.{i}", Account())
        proven = max((line["end"] - len(PROMPT) for line in lines if line["end"] > line["start"]), default=0)
        assert account.tokens == proven <= farthest[i]
        # The last verifier came to a proper end, so only what nobody went on from can be missing.
        if ledgers[i].usage.committed:
            assert account.tokens >= ledgers[i].frontier - len(PROMPT)
        assert sum(line["root_rows"] for line in lines) == account.root_rows <= rows[i]
    merge(here, random)
    assert accounts(here) == found, "copied or merged files are counted once"


def merge(here: Path, random) -> None:
    """Copies of some files, all of them in one with their torn ends, and all their lines in any order."""
    files = sorted(here.iterdir())
    (here / "copies").mkdir()
    for path in files:
        if random.random() < 0.5:
            shutil.copy(path, here / "copies")
    random.shuffle(files)
    data = b"".join(path.read_bytes() for path in files)
    (here / "merged.jsonl").write_bytes(data)
    lines = data.split(b"\n")
    random.shuffle(lines)
    (here / "shuffled.jsonl").write_bytes(b"\n".join(lines))
