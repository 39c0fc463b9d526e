"""The demo's JSON object, from the real processes over the real broker and the emulated link."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools.models import ROOT

KEYS = {"tokens_per_s", "itl_ms_p50", "itl_ms_p95", "acceptance", "cloud_steps_per_token", "bytes_per_token"}


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--top-p", "0.95"]], ids=["greedy", "sampled"])
def test_every_mode_writes_what_the_target_writes_alone(smollm2, sampling):
    command = [sys.executable, "-m", "tools.demo", "--json", "--max-tokens", "24", "--prompts", "1", *sampling]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert list(result["modes"]) == ["cloud", "sync", "async", "never_wait", "auto"]
    assert all(set(figures) >= KEYS for figures in result["modes"].values())
    assert result["modes"]["cloud"]["cloud_steps_per_token"] == 1.0
    assert result["modes"]["async"]["cloud_steps_per_token"] < 0.8
