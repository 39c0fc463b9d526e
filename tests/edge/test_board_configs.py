"""Every board file loads, says nothing that is the default anyway, and says how to flash and whether it was tested."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from link.config import load
from protocol.errors import ConfigError
from tools.boards import FOLDER
from tools.models import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = sorted(FOLDER.glob("*.toml"))
PROMISED = {
    "raspberry-pi-5",
    "raspberry-pi-4",
    "jetson-orin-nano",
    "jetson-orin-nx",
    "jetson-agx-orin",
    "jetson-agx-thor",
    "generic-arm64",
    "generic-x86",
}
YOURS = {("device", "name"), ("broker", "host"), ("drafter", "model")}
DEFAULTS = EdgeConfig(device=DeviceConfig(name="a.b"), drafter=DrafterConfig(model=Path("m")))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_the_boards_that_the_readme_names_are_there():
    assert {path.stem for path in FILES} == PROMISED
    table = (ROOT / "board_configs/README.md").read_text()
    assert all(f"`{name}`" in table for name in PROMISED)


@each_file
def test_it_loads_and_its_header_says_how_to_flash_and_whether_it_was_tested(path: Path):
    board = load(path, EdgeConfig).board
    assert board.kind == path.stem, "what releases call it"
    header = path.read_text().partition("[device]")[0]
    assert "Flash:" in header and path.name in header
    assert board.expected is not None
    word = "Tested:" if board.expected.tested else "Untested"
    assert word in header.splitlines()[0] + header.splitlines()[1], "said in the first lines"


@each_file
def test_it_holds_only_what_differs(path: Path):
    for section, keys in tomllib.loads(path.read_text()).items():
        default = msgspec.to_builtins(getattr(DEFAULTS, section), enc_hook=str)
        for key, value in keys.items():
            assert (section, key) in YOURS or value != default[key], f"[{section}] {key} is the default"


@each_file
def test_a_key_that_is_not_known_is_refused_by_section_and_name(path: Path, tmp_path: Path):
    wrong = tmp_path / path.name
    wrong.write_text(path.read_text().replace("pass_ms", "pass_milliseconds"))
    with pytest.raises(ConfigError, match=rf"{path.name}: \[board\.expected\].*pass_m"):
        load(wrong, EdgeConfig)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('core = "big"', r"\[board\] unknown key `core`.*Did you mean `cores`"),
        ('cores = "small"', r"\[board\] `cores`"),
        ("cores = []", r"\[board\] `cores`"),
        ("cores = [-1]", r"\[board\.cores\] `\[0\]`"),
        ("hot_c = 20.0", r"\[board\] `hot_c`"),
        ("memory_mib = -1", r"\[board\] `memory_mib`"),
        ('power_modes = "MAXN"', r"\[board\] `power_modes`"),
        ("expected = { pass_ms = 1.0 }", r"\[board\.expected\] missing key `row_share`"),
        ('expected = { pass_ms = 0, row_share = 0, prefill_tokens_per_s = 1, source = "x" }', r"`pass_ms`"),
        ('expected = { pass_ms = 1, row_share = 0, prefill_tokens_per_s = 1, source = "" }', r"`source`"),
    ],
)
def test_a_mistake_in_the_boards_section_is_named(tmp_path: Path, line: str, says: str):
    path = tmp_path / "edge.toml"
    path.write_text(f'[device]\nname = "a.b"\n[drafter]\nmodel = "m"\n[board]\n{line}\n')
    with pytest.raises(ConfigError, match=says):
        load(path, EdgeConfig)


def test_cores_may_be_named_by_number(tmp_path: Path):
    path = tmp_path / "edge.toml"
    path.write_text('[device]\nname = "a.b"\n[drafter]\nmodel = "m"\n[board]\ncores = [2, 3]\n')
    assert load(path, EdgeConfig).board.cores == (2, 3)
