"""How much memory keys and values get."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from cloud.engines.memory import available_bytes, kv_budget
from protocol.errors import ModelError

GIB = 1 << 30


def machine(root: Path, files: dict[str, str], available_gib: int = 16, groups: str = "0::/\n") -> Path:
    """A root directory with what the kernel says under /proc and /sys."""
    kib = available_gib * GIB // 1024
    base = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n",
        "proc/self/cgroup": groups,
    }
    for name, text in (base | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group_v2(at: str, limit: str, used: int, idle: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup{at}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {idle}\nactive_file 7\n",
    }


def group_v1(at: str, limit: int, used: int, idle: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{at}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {idle}\n",
    }


V1 = "5:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/\n"
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "groups", "gib"),
    [
        pytest.param({}, "0::/\n", 16, id="no limit"),
        pytest.param(group_v2("/app", "max", GIB), "0::/app\n", 16, id="v2, max"),
        pytest.param(group_v2("/app", str(8 * GIB), 3 * GIB, GIB), "0::/app\n", 6, id="v2, idle files count as free"),
        pytest.param(
            group_v2("/a/b", str(8 * GIB), GIB) | group_v2("/a", str(4 * GIB), GIB), "0::/a/b\n", 3, id="v2, around"
        ),
        pytest.param(group_v2("", str(5 * GIB), GIB), "0::/seen/from/outside\n", 4, id="v2, in a container"),
        pytest.param(group_v1("/docker/abc", 6 * GIB, 4 * GIB, GIB), V1, 3, id="v1"),
        pytest.param(group_v1("/docker/abc", UNLIMITED, 4 * GIB), V1, 16, id="v1, no limit"),
        pytest.param(group_v1("", 2 * GIB, GIB), V1, 1, id="v1, in a container"),
        pytest.param(group_v1("/docker/abc", GIB, 2 * GIB), V1, 0, id="over its limit"),
    ],
)
def test_what_is_available_is_the_least_that_machine_and_groups_leave(
    tmp_path: Path, files: dict[str, str], groups: str, gib: int
) -> None:
    assert available_bytes(machine(tmp_path, files, groups=groups)) == gib * GIB


def test_what_was_asked_for_is_given_or_refused_with_both_numbers(tmp_path: Path) -> None:
    root = machine(tmp_path, {}, available_gib=16)
    assert kv_budget(16 * GIB, root) == 16 * GIB
    with pytest.raises(ModelError, match=r"20\.50 GiB.*16\.00 GiB.*set it to 0"):
        kv_budget(20 * GIB + GIB // 2, root)


def test_without_a_wish_some_is_left_for_the_passes(tmp_path: Path) -> None:
    assert 8 * GIB < kv_budget(0, machine(tmp_path, {}, available_gib=16)) < 14 * GIB


def test_this_machine_has_memory() -> None:
    assert 1 << 26 < available_bytes() < 1 << 50
