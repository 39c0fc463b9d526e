"""Every board file loads, and says nothing that is the default anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.config import EdgeConfig
from link.config import load
from tools.models import ROOT

FILES = sorted((ROOT / "board_configs").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_and_its_header_says_how_to_use_it(path: Path):
    config = load(path, EdgeConfig)
    assert config.device.name and path.read_text().startswith("#")


def test_there_are_some():
    assert FILES
