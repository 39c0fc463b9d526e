"""The board as a service manager sees it: a real process, a real notification socket, and a unit that is checked by
systemd's own tools.
"""

from __future__ import annotations

import configparser
import io
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.journal import Journal
from edge.session import Request
from edge.systemd import STATUS_BYTES, JournalFormatter, Notifier, Service, Watch, is_journal, watchdog_s
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from tests.toys import TARGET
from tools.broker import Broker, free_port
from tools.models import ROOT

UNITS = ROOT / "board_configs" / "systemd"
UNIT = UNITS / "outrider-edge.service"
WATCHDOG_S = 1.2


# -- what is decided --------------------------------------------------------------------------------------------------


def test_signs_of_life_come_four_times_as_often_as_they_must_while_all_loops_get_on():
    watch = Watch(watchdog_s=8.0)
    fed = [now for now in range(17) if "WATCHDOG=1" in watch.look({"link": float(now)}, "idle", float(now))]
    assert fed == [0, 2, 4, 6, 8, 10, 12, 14, 16]


def test_a_loop_may_take_half_of_the_watchdogs_time_for_a_turn_and_no_more():
    watch = Watch(watchdog_s=8.0)
    assert "WATCHDOG=1" in watch.look({"link": 100.0, "session": 96.0}, "", 100.0)
    lines = watch.look({"link": 104.1, "session": 100.0}, "busy", 104.1)
    assert lines == ["STATUS=stuck: session has not got on for more than 4 s"]
    assert watch.look({"link": 104.2, "session": 104.2}, "busy", 104.2) == ["STATUS=busy", "WATCHDOG=1"]


def test_a_link_that_may_take_its_time_to_connect_is_ahead_of_the_clock():
    watch = Watch(watchdog_s=8.0)
    assert not watch.stuck({"link": 280.0}, 280.0 + 3.9)
    assert watch.stuck({"link": 280.0}, 280.0 + 4.1)


def test_a_status_is_told_when_it_changes_as_one_short_line():
    watch = Watch()
    assert watch.look({}, "not connected:\n refused", 0.0) == ["STATUS=not connected: refused"]
    assert watch.look({}, "not connected:\n refused", 1.0) == []
    (line,) = watch.look({}, "x" * 5000, 2.0)
    assert len(line) == len("STATUS=") + STATUS_BYTES


def test_without_a_watchdog_nothing_is_fed_but_a_hang_is_still_named():
    watch = Watch(None)
    assert watch.look({"link": 0.0}, "idle", 1.0) == ["STATUS=idle"]
    assert watch.look({"link": 0.0}, "idle", 100.0) == [
        "STATUS=stuck: link has not got on for more than 30 s",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdogs_time_is_the_environments_where_it_is_meant_for_this_process(environment, expected):
    assert watchdog_s(environment, 7) == expected


def test_an_abstract_socket_is_reached_and_a_manager_that_is_gone_disturbs_nobody(caplog):
    name = f"outrider-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind("\0" + name)
        notifier = Notifier.of({"NOTIFY_SOCKET": "@" + name})
        notifier.send("READY=1", "STATUS=on")
        assert ear.recv(4096) == b"READY=1\nSTATUS=on"
    notifier.send("WATCHDOG=1")
    assert "does not hear us" in caplog.text
    Notifier.of({}).send("READY=1")


def test_a_board_that_begins_again_does_not_stop_and_has_time_to_load(tmp_path):
    """A manager that is told of a stop ends what has not stopped in time; the process id stays, so must the unit."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"), watchdog_s=60.0)
        service = Service(notifier, dict, lambda: "idle")
        service.beginning_again()
        told = ear.recv(4096).decode().splitlines()
        assert "WATCHDOG_USEC=600000000" in told and "STOPPING=1" not in told
        service.ready()
        assert ear.recv(4096).decode().splitlines() == ["READY=1", "WATCHDOG_USEC=60000000"]


# -- logs -------------------------------------------------------------------------------------------------------------


def test_every_line_of_a_log_has_its_severity_in_front():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    log = logging.Logger("board")
    log.addHandler(handler)
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        log.exception("it broke")
    log.warning("warm")
    log.info("calm")
    log.debug("quiet")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "<3>board: it broke"
    assert "<3>second" in lines and all(line.startswith("<3>") for line in lines[:-3])
    assert lines[-3:] == ["<4>board: warm", "<6>board: calm", "<7>board: quiet"]


def test_the_journal_is_told_from_a_file_by_its_device_and_inode(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        found = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "1:1"})


# -- a real process ---------------------------------------------------------------------------------------------------


class Manager:
    """The service manager's end: a socket that hears, and the child that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.heard: list[str] = []
        self.child: subprocess.Popen[str] | None = None
        self.log = folder / "log"
        self.api_port = free_port()

    def configure(self, broker_port: int, **sections: str) -> Path:
        given = {
            "device": f'name = "test.board"\nstate = "{self.folder / "state"}"',
            "broker": f"port = {broker_port}\nbackoff_max_s = 0.3",
            "drafter": 'model = "toy"',
            "api": f"port = {self.api_port}",
            **sections,
        }
        path = self.folder / "edge.toml"
        path.write_text("".join(f"[{section}]\n{body}\n" for section, body in given.items()))
        return path

    def start(self, config: Path, *, script: str = "reads", watchdog: bool = True) -> None:
        with open(self.log, "w") as log:
            found = os.fstat(log.fileno())
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tests.edge.service_child", str(config)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "SCRIPT": script,
                    "NOTIFY_SOCKET": str(self.folder / "notify"),
                    "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}",
                    **({"WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))} if watchdog else {}),
                },
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
            )

    def listen(self, seconds: float) -> list[str]:
        """Lines of the next so many seconds."""
        return list(self._lines(seconds))

    def until(self, wanted: str, seconds: float = 20.0) -> None:
        """Return once a line begins so."""
        for line in self._lines(seconds):
            if line.startswith(wanted):
                return
        raise AssertionError(f"no {wanted} within {seconds} s; heard {self.heard}\n{self.log.read_text()}")

    def _lines(self, seconds: float) -> Iterator[str]:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                lines = self.socket.recv(1 << 16).decode().split("\n")
            except TimeoutError:
                return
            self.heard += lines
            yield from lines

    def stop(self) -> int:
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(15)

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        self.socket.close()


@pytest.fixture
def manager(tmp_path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


def leave_a_session(state: Path) -> None:
    """What a crash leaves behind: the board takes it up at its start."""
    Journal(state / "journal").begin(Request(7, TARGET, tuple(range(3, 20)), Sampling(), 50)).close()


def test_an_idle_board_is_ready_and_lives_with_nobody_at_the_brokers_address(manager):
    manager.start(manager.configure(free_port()))
    manager.until("READY=1")
    with socket.create_connection(("127.0.0.1", manager.api_port), 2):
        pass
    lines = manager.listen(1.75 * WATCHDOG_S)
    assert lines.count("WATCHDOG=1") >= 4
    assert any(line.startswith("STATUS=idle, not connected: ") and "refused" in line for line in manager.heard)
    assert manager.stop() == 0
    assert "STOPPING=1" in manager.listen(0.2)


def test_a_broker_that_takes_the_connection_and_says_nothing_delays_nothing(manager):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        manager.start(manager.configure(silent.getsockname()[1]))
        manager.until("READY=1")
        assert manager.listen(2 * WATCHDOG_S).count("WATCHDOG=1") >= 4


def test_a_person_reads_when_the_broker_comes_and_goes(manager, broker_kinds):
    broker = Broker.start()
    try:
        manager.start(manager.configure(broker.port))
        manager.until(f"STATUS=idle, connected to 127.0.0.1:{broker.port}")
    finally:
        broker.stop()
    manager.until("STATUS=idle, not connected: ")


def test_a_drafter_that_hangs_ends_the_signs_of_life_and_is_named(manager):
    leave_a_session(manager.folder / "state")
    manager.start(manager.configure(free_port()), script="hangs")
    manager.until("READY=1")
    manager.until("STATUS=stuck: session 0000000000000007")
    assert manager.heard.count("WATCHDOG=1") >= 1
    assert "WATCHDOG=1" not in manager.listen(2 * WATCHDOG_S)
    assert manager.child is not None and manager.child.poll() is None
    manager.child.send_signal(signal.SIGABRT)  # as the manager does then
    assert manager.child.wait(10) == -signal.SIGABRT
    said = manager.log.read_text()
    assert re.search(r"^<3>ERROR \S+: session 0000000000000007 has not got on", said, re.MULTILINE)
    assert re.search(r"service_child\.py\", line \d+ in prefill", said), "the log tells where it hung"


def test_a_long_prompt_that_is_read_chunk_by_chunk_is_no_hang(manager):
    leave_a_session(manager.folder / "state")
    manager.start(manager.configure(free_port()), script="slow")
    manager.until("READY=1")
    assert manager.listen(1.75 * WATCHDOG_S).count("WATCHDOG=1") >= 4
    assert not any("stuck" in line for line in manager.heard)


def test_a_session_that_waits_for_a_network_is_no_hang(manager):
    leave_a_session(manager.folder / "state")
    manager.start(manager.configure(free_port()))
    manager.until("STATUS=1 session, not connected: ")
    assert manager.listen(1.75 * WATCHDOG_S).count("WATCHDOG=1") >= 4


def test_a_link_that_hangs_ends_the_signs_of_life(manager):
    manager.start(manager.configure(free_port()), script="deaf")
    manager.until("STATUS=stuck: the link has not got on")
    assert "READY=1" in manager.heard and "WATCHDOG=1" not in manager.listen(1.5 * WATCHDOG_S)


def test_a_bad_configuration_has_the_exit_code_that_the_unit_does_not_restart(manager):
    manager.start(manager.configure(1883, drafter='modle = "toy"'))
    manager.until("STATUS=", 20)
    assert manager.child is not None and manager.child.wait(10) == ConfigError.exit_code
    assert "modle" in manager.heard[-1] and "READY=1" not in manager.heard
    assert f"RestartPreventExitStatus={ConfigError.exit_code}\n" in UNIT.read_text()


# -- the unit ---------------------------------------------------------------------------------------------------------


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)


def exposure(unit: Path) -> float:
    done = analyze("security", "--offline=true", "--no-pager", unit)
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


def with_drop_in(folder: Path, name: str) -> Path:
    """The unit in a folder with one of its drop-ins."""
    unit = shutil.copy(UNIT, folder)
    (folder / f"{UNIT.name}.d").mkdir()
    shutil.copy(UNITS / name, folder / f"{UNIT.name}.d")
    return Path(unit)


def test_systemd_finds_the_service_little_exposed():
    assert exposure(UNIT) <= 2.0


def test_the_drop_in_for_gpus_opens_little_more(tmp_path):
    assert exposure(UNIT) < exposure(with_drop_in(tmp_path, "gpu.conf")) <= 3.0


@pytest.mark.parametrize("drop_in", ["gpu.conf", "unattended.conf"])
def test_systemd_understands_every_line(tmp_path, drop_in):
    unit = with_drop_in(tmp_path, drop_in)
    unit.write_text(unit.read_text().replace("/opt/outrider/bin/outrider-edge", "/bin/true"))
    done = analyze("verify", "--man=no", unit)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "outrider" in line]
    assert not ours and done.returncode == 0, done.stderr


def test_the_unit_waits_for_no_network():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert not any("network" in value for section in unit.values() for value in section.values())
