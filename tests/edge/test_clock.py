"""When certificates hold, and whether anybody keeps the clock."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import datetime, timedelta, timezone

import pytest

from edge import clock
from protocol.errors import ConfigError
from tests.edge.certificates import NOW, certificate


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (NOW - timedelta(days=1), NOW + timedelta(days=365)),
        (datetime(1999, 12, 31, 23, 59, 59, tzinfo=timezone.utc), datetime(2049, 12, 31, tzinfo=timezone.utc)),
        (datetime(2026, 2, 28, 1, 2, 3, tzinfo=timezone.utc), datetime(2050, 1, 1, tzinfo=timezone.utc)),
    ],
)
def test_the_dates_are_those_that_were_written(tmp_path, begins, ends):
    assert clock.validity(certificate(tmp_path, begins, ends)) == clock.Validity(begins, ends)


def test_a_file_without_a_certificate_is_named(tmp_path):
    empty, cut = tmp_path / "empty.pem", tmp_path / "cut.pem"
    empty.write_text("nothing\n")
    whole = certificate(tmp_path, NOW, NOW + timedelta(days=1)).read_text().splitlines()
    cut.write_text("\n".join([*whole[:4], whole[-1]]))
    for path in (empty, cut):
        with pytest.raises(ConfigError, match=rf"{path.name}: holds no certificate"):
            clock.validity(path)
    with pytest.raises(ConfigError, match=r"none\.pem"):
        clock.validity(tmp_path / "none.pem")


def test_no_right_clock_is_before_the_youngest_file(tmp_path):
    old, young = tmp_path / "old", tmp_path / "young"
    for path, when in ((old, 1_000_000_000), (young, 1_800_000_000)):
        path.touch()
        os.utime(path, (when, when))
    assert clock.newest(old, young) == datetime.fromtimestamp(1_800_000_000, timezone.utc)


def test_the_kernel_says_whether_somebody_keeps_the_clock():
    if shutil.which("timedatectl") is None:
        pytest.skip("timedatectl, which tells the same, is not installed")
    told = subprocess.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], capture_output=True, text=True)
    if told.returncode:
        pytest.skip(f"timedatectl: {told.stderr.strip()}")
    assert clock.synchronised() == (told.stdout.strip() == "yes")
