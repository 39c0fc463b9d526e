"""What a board's files say of it, and how much it then drafts. The files are as boards have them."""

from __future__ import annotations

import pytest

from edge import health
from edge.config import BoardConfig
from edge.health import Throttle, complaint, drafting_share, look
from tests.edge.boardfiles import MODES, NANO, PI5, BoardFiles

ANY = BoardConfig()
PI4_FILE = "sys/devices/platform/soc/soc:firmware/get_throttled"
PI5_FILE = "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"


@pytest.fixture
def files(tmp_path) -> BoardFiles:
    return BoardFiles(tmp_path)


@pytest.mark.parametrize("file", [PI4_FILE, PI5_FILE])
@pytest.mark.parametrize(
    ("word", "now", "past"),
    [
        ("0", "", []),
        ("1", "its supply's voltage is too low", []),
        ("2", "its frequency is capped", []),
        ("4", "it is throttled", []),
        ("8", "it is at its soft temperature limit", []),
        ("10000", "", ["under-voltage"]),
        ("20000", "", ["a capped frequency"]),
        ("40000", "", ["throttling"]),
        ("80000", "", ["the soft temperature limit"]),
        ("50005", "its supply's voltage is too low; it is throttled", ["under-voltage", "throttling"]),
    ],
)
def test_each_of_the_pis_eight_bits(files, file, word, now, past):
    files.write("proc/device-tree/model", PI5).write(file, f"{word}\n")
    facts = look(ANY, files.root)
    assert facts.throttle == int(word, 16)
    assert (complaint(facts), health.was_throttled(facts)) == (now, past)


def test_a_pi_whose_kernel_has_no_such_file_is_asked_through_its_firmware(files, tmp_path, monkeypatch):
    tool = tmp_path / "bin/vcgencmd"
    files.write("bin/vcgencmd", '#!/bin/sh\n[ "$1" = get_throttled ] && echo throttled=0x50005\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    files.write("proc/device-tree/model", PI5)
    assert look(ANY, files.root).throttle == 0x50005
    files.write("proc/device-tree/model", NANO)
    assert look(ANY, files.root).throttle == 0, "another board has no such firmware"


def test_a_word_that_is_none_says_nothing(files):
    files.write("proc/device-tree/model", PI5).write(PI4_FILE, "what?\n")
    assert look(ANY, files.root).throttle == 0


def test_a_jetsons_power_mode_is_its_name_not_its_number(files):
    files.write("var/lib/nvpmodel/status", "pmode:0002 fmode:quiet\n").write("etc/nvpmodel.conf", MODES)
    assert look(ANY, files.root).power_mode == "MAXN_SUPER"
    files.write("var/lib/nvpmodel/status", "pmode:0007\n")
    assert look(ANY, files.root).power_mode == "7"


def test_alerts_and_caps_are_throttling_and_a_fan_is_not(files):
    files.cooler("pwm-fan", 3)
    files.cooler("gpu-throttle-alert", 0)
    assert look(ANY, files.root).throttle == 0
    files.cooler("cpu-throttle-alert", 1)
    files.cooler("cpufreq-cpu4", 2)
    facts = look(ANY, files.root)
    assert facts.throttle == Throttle.THROTTLED and facts.slowed_by == ("cpu-throttle-alert", "cpufreq-cpu4")
    assert "cpu-throttle-alert" in complaint(facts)


def test_over_current_events_of_a_jetson_are_counted(files):
    for name, count in [("oc1_event_cnt", 0), ("oc2_event_cnt", 15), ("oc3_event_cnt", 37)]:
        files.write(f"sys/class/hwmon/hwmon3/{name}", f"{count}\n")
    facts = look(ANY, files.root)
    assert facts.overcurrents == 52 and health.was_throttled(facts) == ["52 over-current events"]
    assert drafting_share(facts) == 1, "they are past"


def test_the_zone_nearest_to_its_own_limit_counts(files):
    files.zone("cpu-thermal", 70_000, passive=95_000, critical=104_500, active=50_000)
    files.zone("gpu-thermal", None)
    files.zone("soc0-thermal", 69_000, passive=75_000, hot=99_000)
    files.zone("off-thermal", -256_000)
    zone = look(ANY, files.root).hottest
    assert zone is not None and (zone.name, zone.celsius, zone.hot_c) == ("soc0-thermal", 69, 75)
    chosen = look(BoardConfig(thermal_zones=("cpu-thermal",)), files.root).hottest
    assert chosen is not None and (chosen.name, chosen.hot_c) == ("cpu-thermal", 95)
    limited = look(BoardConfig(hot_c=72.0, thermal_zones=("cpu-thermal",)), files.root).hottest
    assert limited is not None and limited.headroom_c == 2


@pytest.mark.parametrize(
    ("milli_c", "share"),
    [(40_000, 1.0), (70_000, 1.0), (71_000, 0.75), (74_000, 0.5), (77_000, 0.25), (80_000, 0.25), (90_000, 0.25)],
)
def test_a_hot_board_drafts_less_the_hotter_it_is(files, milli_c, share):
    files.zone("cpu-thermal", milli_c)
    facts = look(BoardConfig(hot_c=80.0), files.root)
    assert drafting_share(facts) == share
    assert bool(complaint(facts)) == (share < 1)
    if share < 1:
        assert "cpu-thermal" in complaint(facts) and f"{milli_c // 1000} °C" in complaint(facts)


def test_throttling_costs_more_than_the_soft_limit():
    shares = [drafting_share(health.Facts(throttle=bit)) for bit in (Throttle(0), Throttle.SOFT_LIMIT, Throttle.CAPPED)]
    assert shares == [1.0, 0.5, 0.25]


def test_memory_is_the_machines_or_what_the_control_group_leaves(files):
    files.write("proc/meminfo", "MemTotal:  4000768 kB\nMemFree: 100 kB\nMemAvailable:  2048000 kB\n")
    assert (look(ANY, files.root).total_mib, look(ANY, files.root).free_mib) == (3907, 2000)
    files.write("proc/self/cgroup", "0::/system.slice/outrider.service\n")
    group = "sys/fs/cgroup/system.slice/outrider.service"
    files.write(f"{group}/memory.max", "max\n").write(f"{group}/memory.current", f"{200 << 20}\n")
    assert look(ANY, files.root).free_mib == 2000
    files.write(f"{group}/memory.max", f"{900 << 20}\n")
    assert (look(ANY, files.root).total_mib, look(ANY, files.root).free_mib) == (900, 700)


def test_a_machine_that_tells_nothing_is_well(tmp_path):
    facts = look(ANY, tmp_path)
    assert facts == health.Facts() and drafting_share(facts) == 1 and complaint(facts) == ""
