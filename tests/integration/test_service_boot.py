"""A flashed board boots: systemd itself, the unit's sandbox and all, with no network but loopback. It lives again after
whatever ends it, and stays down only where starting again would not help.
"""

from __future__ import annotations

import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Iterator

import pytest

from protocol.errors import ConfigError
from tests.box import Box, why_not
from tools.flash.agent import UNIT
from tools.models import ROOT

WATCHDOG_S = 4
CONFIG = """\
[device]
name = "acme.kitchen"
[broker]
host = "broker.invalid"
[drafter]
model = "/var/lib/outrider/models/drafter"
threads = 1
"""
# This machine's files, which it cannot change. The interpreter and its libraries as they are here, at places that the
# service may see; the checkout is the program.
PREPARE = """\
mkdir "$root-up" "$root-work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$root-up,workdir=$root-work" "$root"
rm -rf $root/var/log/journal
mkdir -p $root/srv/python $root/srv/site $root/srv/source $root/opt/outrider/bin $root/etc/systemd/system/{unit}.d
mount --bind {python} $root/srv/python
mount --bind {site} $root/srv/site
mount --bind {source} $root/srv/source
cat > $root/opt/outrider/bin/outrider-edge <<'END'
#!/bin/sh
export PYTHONPATH=/srv/source:/srv/site LD_LIBRARY_PATH=/srv/python/lib
exec /srv/python/bin/{interpreter} -c 'from edge.cli import main; main()' "$@"
END
chmod 755 $root/opt/outrider/bin/outrider-edge
cat > $root/etc/systemd/system/{unit}.d/test.conf <<'END'
[Service]
WatchdogSec={watchdog_s}s
RestartSec=100ms
TimeoutAbortSec=1s
END
cd {source}
{executable} -m tools.flash --image $root --config {config} --model {model} --yes
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory, smollm2) -> Iterator[Box]:
    if lacking := why_not(tmp_path_factory.mktemp("try")):
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("box")
    config = folder / "edge.toml"
    config.write_text(CONFIG)
    facts = {
        "unit": UNIT,
        "python": sys.base_prefix,
        "site": sysconfig.get_path("platlib"),
        "source": ROOT,
        "interpreter": f"python{sys.version_info.major}.{sys.version_info.minor}",
        "watchdog_s": WATCHDOG_S,
        "executable": sys.executable,
        "config": config,
        "model": smollm2[0],
    }
    prepare = PREPARE.format(**{name: shlex.quote(str(value)) for name, value in facts.items()})
    made = Box(folder, prepare, target=UNIT)
    yield made
    made.close()


@pytest.fixture
def running(box) -> Box:
    """The service runs, whatever an earlier test did to it."""
    box.run("systemctl", "reset-failed", UNIT)
    box.run("systemctl", "start", UNIT)
    box.until("ActiveState", "active")
    return box


def test_it_serves_without_a_network_and_says_what_it_waits_for(running):
    running.until("SubState", "running")
    assert running.show("StatusText").startswith("idle, not connected: broker.invalid:1883: no such host")
    answer = running.run(
        "/srv/python/bin/python3", "-c",
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8177/v1/models').read().decode())",
    )  # fmt: skip
    assert "smollm2" in answer
    assert " network" not in running.show("After") and "network" not in running.show("Wants")


def test_it_has_no_right_that_it_does_not_need(running):
    status = running.run("cat", f"/proc/{running.pid()}/status")
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(facts[name], 16) for name in ("CapBnd", "CapEff", "CapPrm", "CapAmb")} == {0}
    assert facts["NoNewPrivs"] == "1" and facts["Seccomp"] == "2"
    assert facts["Uid"].split()[0] == running.run("id", "-u", "outrider") != "0"
    mounts = running.run("cat", f"/proc/{running.pid()}/mounts").splitlines()
    writable = {line.split()[1] for line in mounts if "rw" in line.split()[3].split(",")}
    state = {path for path in writable if path.startswith(("/var", "/etc", "/usr", "/opt", "/srv", "/root", "/home"))}
    assert state == {"/var/lib/outrider", "/var/tmp"} and "/" not in writable


def test_its_log_has_levels_that_the_journal_knows(running):
    assert "applications may ask" in running.journal("-p", "info")
    assert "no such host" in running.journal("-p", "warning")
    assert "applications may ask" not in running.journal("-p", "warning")


def test_a_process_that_is_killed_is_started_again(running):
    first = running.pid()
    running.run("kill", "-KILL", str(first))
    running.until("NRestarts", "1")
    running.until("ActiveState", "active")
    assert running.pid() not in (0, first)


def test_a_process_that_stands_still_is_ended_by_the_watchdog_and_started_again(running):
    first = running.pid()
    running.run("kill", "-STOP", str(first))
    running.until("NRestarts", "1", 4 * WATCHDOG_S)
    running.until("ActiveState", "active")
    assert running.pid() != first and "Watchdog timeout" in running.journal()


def test_a_configuration_that_cannot_be_used_is_not_tried_again(running):
    config = running.run("cat", "/etc/outrider/edge.toml")
    try:
        running.run("sed", "-i", "s/threads/thread/", "/etc/outrider/edge.toml")
        running.run("systemctl", "restart", UNIT)
        running.until("ActiveState", "failed")
        time.sleep(0.5)
        assert running.show("ExecMainStatus") == str(ConfigError.exit_code)
        assert (running.show("ActiveState"), running.show("NRestarts")) == ("failed", "0")
        assert re.search(r"edge\.toml: \[drafter\] unknown key `thread`", running.journal("-p", "err"))
        assert "unknown key `thread`" in running.show("StatusText")
    finally:
        running.run("sh", "-c", f"echo {shlex.quote(config)} > /etc/outrider/edge.toml")


def test_a_root_that_is_read_only_is_enough(running):
    running.run("mount", "--bind", "/var/lib/outrider", "/var/lib/outrider")
    running.run("mount", "-o", "remount,bind,ro", "/")
    try:
        assert "Read-only" in running.run("sh", "-c", "touch /etc/outrider/x 2>&1")
        running.run("systemctl", "restart", UNIT)
        running.until("ActiveState", "active")
    finally:
        running.run("mount", "-o", "remount,bind,rw", "/")
