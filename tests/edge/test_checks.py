"""`outrider-edge check`: what is found, in which order, and what a person is told to do."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

import edge.checks
from edge.checks import Report, run_checks
from edge.cli import main
from edge.drafters import golden, manifest
from edge.drafters.base import Candidate
from edge.drafters.manifest import Golden
from tests.edge.boardfiles import MODES, NANO, PI5, BoardFiles
from tests.edge.certificates import NOW, certificate
from tests.edge.checking import config, found
from tests.toys import ToyDrafter
from tools.broker import Broker, free_port

ROOMY = "MemTotal: 8000000 kB\nMemAvailable: 7000000 kB\n"


@pytest.fixture
def files(tmp_path) -> BoardFiles:
    return BoardFiles(tmp_path / "root").write("proc/meminfo", ROOMY)


def checked(path: Path, files: BoardFiles, *, now: datetime | None = None, wait_s: float = 0.1) -> Report:
    return run_checks(path, wait_s, root=files.root, now=now)


def test_all_that_can_be_looked_at_is_even_where_much_fails(tmp_path, files):
    report = checked(config(tmp_path), files)
    names = [finding.name for finding in report.findings]
    expected = ["configuration", "hardware", "clock", "power mode", "temperature", "memory", "drafter", "broker"]
    assert names == expected
    assert report.status == "fail" and report.exit_code == 66, "the first that failed: the drafter"
    assert found(report, "drafter").remedy and found(report, "broker").exit_code == 69


def test_a_configuration_that_cannot_be_read_still_tells_of_the_board(tmp_path, files):
    path = tmp_path / "edge.toml"
    path.write_text("[device]\nname = 1\n")
    files.zone("cpu-thermal", 40_000)
    report = checked(path, files)
    assert report.exit_code == 78
    assert [finding.name for finding in report.findings] == ["configuration", "hardware", "clock"]


def test_the_wrong_boards_file_is_a_warning(tmp_path, files):
    files.write("proc/device-tree/model", PI5)
    right = found(checked(config(tmp_path, board='hardware = "Raspberry Pi 5"'), files), "hardware")
    assert (right.status, right.what) == ("ok", "Raspberry Pi 5 Model B Rev 1.0")
    wrong = found(checked(config(tmp_path, board='hardware = "Orin Nano"'), files), "hardware")
    assert wrong.status == "warn" and "'Orin Nano'" in wrong.what and "board_configs/" in wrong.remedy


def test_a_slow_power_mode_is_a_warning_that_says_how_to_leave_it(tmp_path, files):
    files.write("proc/device-tree/model", NANO).write("etc/nvpmodel.conf", MODES)
    path = config(tmp_path, board='power_modes = ["MAXN_SUPER", "25W"]')
    files.write("var/lib/nvpmodel/status", "pmode:0000\n")
    slow = found(checked(path, files), "power mode")
    assert slow.status == "warn" and slow.what.startswith("15W") and "nvpmodel -m" in slow.remedy
    files.write("var/lib/nvpmodel/status", "pmode:0001\n")
    assert found(checked(path, files), "power mode").status == "ok"


def test_heat_and_what_has_happened_since_the_start_are_warnings(tmp_path, files):
    temp = files.zone("cpu-thermal", 41_000)
    path = config(tmp_path, board="hot_c = 80.0")
    assert found(checked(path, files), "temperature").what == "cpu-thermal at 41 °C of 80"
    temp.write_text("79000\n")
    hot = found(checked(path, files), "temperature")
    assert hot.status == "warn" and "drafts 25 % of its time" in hot.what and "79 °C" in hot.what
    temp.write_text("41000\n")
    files.write("proc/device-tree/model", PI5)
    files.write("sys/devices/platform/soc/soc:firmware/get_throttled", "50000\n")
    past = found(checked(path, files), "temperature")
    assert past.status == "warn" and "under-voltage, throttling" in past.what and "supply" in past.remedy


def test_memory_that_the_drafter_does_not_fit_into_is_named_before_it_is_loaded(tmp_path, files):
    model = tmp_path / "drafter"
    model.mkdir()
    with (model / "model.onnx.data").open("wb") as weights:
        weights.truncate(1000 << 20)
    path = config(tmp_path, drafter=str(model))
    for free, status in ((900, "fail"), (1300, "warn"), (2000, "ok")):
        files.write("proc/meminfo", f"MemTotal: 8000000 kB\nMemAvailable: {free << 10} kB\n")
        memory = found(checked(path, files), "memory")
        assert (memory.status, bool(memory.remedy)) == (status, status != "ok"), free
    limited = config(tmp_path, drafter=str(model), board="memory_mib = 900")
    assert found(checked(limited, files), "memory").status == "fail"


@pytest.mark.parametrize(("days", "status"), [(0, "ok"), (-3650, "fail")])
def test_a_clock_before_the_boards_own_files_is_wrong(tmp_path, files, days, status, monkeypatch):
    monkeypatch.setattr(edge.checks.clock, "synchronised", lambda: True)
    now = datetime.now(timezone.utc) + timedelta(days=days, seconds=1)
    clock = found(checked(config(tmp_path), files, now=now), "clock")
    assert clock.status == status
    assert status == "ok" or ("in the past" in clock.what and "NTP" in clock.remedy)


def test_a_clock_that_nobody_keeps_is_a_warning(tmp_path, files, monkeypatch):
    monkeypatch.setattr(edge.checks.clock, "synchronised", lambda: False)
    now = datetime.now(timezone.utc) + timedelta(seconds=1)
    assert found(checked(config(tmp_path), files, now=now), "clock").status == "warn"


@pytest.mark.parametrize(
    ("begins", "ends", "status", "says"),
    [
        (-10, 365, "ok", "valid until"),
        (-10, 20, "warn", "days from now"),
        (-10, -1, "fail", "out of date since"),
        (5, 365, "fail", "clock says"),
    ],
)
def test_certificates_that_do_not_hold_are_named_with_both_reasons(tmp_path, files, begins, ends, status, says):
    pem = certificate(tmp_path, NOW + timedelta(days=begins), NOW + timedelta(days=ends))
    tls = f'[broker.tls]\nca = "{pem}"\ncert = "{pem}"\nkey = "{pem.with_suffix(".key")}"'
    report = checked(config(tmp_path, broker=tls), files, now=datetime.now(timezone.utc) + timedelta(seconds=1))
    dates = found(report, "certificates")
    assert dates.status == status and says in dates.what and "board.pem" in dates.what
    if status == "fail":
        assert "clock" in dates.remedy and report.exit_code == 78


def test_without_tls_nothing_is_said_of_certificates(tmp_path, files):
    assert "certificates" not in [finding.name for finding in checked(config(tmp_path), files).findings]


class Forgetful(ToyDrafter):
    """Computes otherwise each time, as a board with bad memory does."""

    reads = 0

    def prefill(self, ids, progress=None):
        self.reads += 1
        return super().prefill(ids)

    def candidates(self, row, sampling, n):
        guesses = super().candidates(row, sampling, n)
        return [Candidate((guess.id + self.reads) % 64, guess.probability) for guess in guesses]


class Words:
    def chat(self, messages):
        return [5, 6, 7]

    def decode(self, ids):
        return " ".join(map(str, ids))


def loads(
    monkeypatch: pytest.MonkeyPatch, drafter: ToyDrafter, made: Golden | None = None, runtime: str = "native"
) -> None:
    """The configuration's model is this one."""
    monkeypatch.setattr(edge.checks, "load_model", lambda config, beside_service: drafter)
    monkeypatch.setattr(edge.checks, "load_text", lambda config: Words())
    facts = SimpleNamespace(golden=made, runtime=runtime)
    monkeypatch.setattr(edge.checks.manifest, "read", lambda directory, kind: facts)


@pytest.mark.parametrize(("drafter", "status"), [(ToyDrafter(), "ok"), (Forgetful(), "fail")])
def test_a_board_that_does_not_compute_the_same_twice_fails(tmp_path, files, monkeypatch, drafter, status):
    loads(monkeypatch, drafter)
    test = found(checked(config(tmp_path), files), "self-test")
    assert test.status == status
    assert ("the same when computed twice" if status == "ok" else "otherwise") in test.what


@pytest.mark.parametrize(("limit", "status"), [(900, "ok"), (700, "warn")])
def test_memory_that_was_really_taken_is_held_against_the_limit(tmp_path, files, monkeypatch, limit, status):
    loads(monkeypatch, ToyDrafter())
    files.write("proc/self/status", f"Name: python\nVmHWM:\t{800 << 10} kB\n")
    test = found(checked(config(tmp_path, board=f"memory_mib = {limit}"), files), "self-test")
    assert test.status == status and "800 MiB" in test.what and (status == "ok" or "`context`" in test.remedy)


def test_guesses_of_the_manifest_that_come_out_otherwise_fail(tmp_path, files, monkeypatch):
    made = golden.record(ToyDrafter(), [5, 6, 7])
    loads(monkeypatch, ToyDrafter(), made)
    right = found(checked(config(tmp_path), files), "self-test")
    assert right.status == "ok" and f"{len(made.sure)} as in the manifest" in right.what
    loads(monkeypatch, ToyDrafter(lambda position: True), made)  # wrong everywhere, and each time the same
    wrong = found(checked(config(tmp_path), files), "self-test")
    assert wrong.status == "fail" and wrong.exit_code == 66 and "guesses in the manifest are others" in wrong.what


def test_a_provider_that_runs_nothing_of_the_graph_is_a_warning(tmp_path, files, monkeypatch):
    toy = ToyDrafter()
    toy.info = replace(toy.info, provider="XnnpackExecutionProvider")
    loads(monkeypatch, toy, runtime="onnx")
    drafter = found(checked(config(tmp_path), files), "drafter")
    assert drafter.status == "warn"
    assert "on Xnnpack" in drafter.what and "CPUExecutionProvider was asked for" in drafter.what


def test_each_broker_is_tried_by_itself(tmp_path, files, broker_kinds):
    with Broker.start() as broker:
        absent = free_port()
        places = f'port = {broker.port}\nstandby = ["127.0.0.1:{absent}", "localhost:{broker.port}"]'
        report = checked(config(tmp_path, broker=places), files)
    tried = [(one.status, one.what) for one in report.findings if one.name in ("broker", "standby broker")]
    assert [status for status, _ in tried] == ["ok", "fail", "ok"]
    assert f"127.0.0.1:{absent}: connection refused" in tried[1][1]


def test_a_real_drafter_and_broker(tmp_path, files, smollm2, broker_kinds):
    """As a program reads it: one JSON object, and the exit code of the only thing that failed, the verifier."""
    with Broker.start() as broker:
        path = config(tmp_path, drafter=str(smollm2[0]), broker=f"port = {broker.port}")
        run = CliRunner().invoke(main, ["check", "--config", str(path), "--json", "--wait-s", "0.5"])
        report = msgspec.json.decode(run.stdout, type=Report)
        assert set(json.loads(run.stdout)) == {"status", "exit_code", "findings"}
        assert run.exit_code == report.exit_code == 69
        failed = [finding.name for finding in report.findings if finding.status == "fail"]
        assert failed == ["verifier"]
        facts = manifest.read(smollm2[0], "drafter")
        assert f"digest {facts.weights_digest[:12]} as in its manifest" in found(report, "drafter").what
        computed_by = "native" if facts.runtime == "native" else "CPUExecutionProvider"
        assert f"{facts.compute} on {computed_by}" in found(report, "drafter").what
        assert "ms a guess" in found(report, "self-test").what
        said = CliRunner().invoke(main, ["check", "--config", str(path), "--wait-s", "0.5"])
        assert "FAIL verifier:" in said.stdout and "outrider-cloud serve" in said.stdout
        assert "ok   broker:" in said.stdout
