"""The benchmark of the link as a person runs it: real processes, broker and proxy; only computing is replayed."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from cloud.engines.base import Plan, Work
from protocol.sampling import Sampling
from tools.arrivals import gaps_ms, mean_gap_ms
from tools.bench.timed import TimedDrafter, TimedEngine
from tools.boards import BoardTiming
from tools.broker import available
from tools.models import ROOT
from tools.plan.synthetic import independent_trace
from tools.traces import save
from tools.twin.replay import Script, StepTime

STEP_MS = 20
FIGURES = {
    "itl_ms_mean", "itl_ms_p50", "itl_ms_p95", "first_token_ms", "cloud_steps_per_token", "drafts_per_token",
    "twin_itl_ms_mean", "live_over_twin",
}  # fmt: skip


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench", "link", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Cloud alone and the waiting chain, a drafter that is right four times in five; plain and encrypted."""
    if "mosquitto" not in available():
        pytest.skip("needs mosquitto, for TLS")
    folder = tmp_path_factory.mktemp("bench")
    save(folder / "short.json", [independent_trace(0.8, 32, seed=1)])
    done = bench(
        f"--traces={folder / 'short.json'}", "--rtt-ms=20", "--mode=cloud", "--mode=async",
        f"--cloud-step-ms={STEP_MS}", f"--picture={folder / 'short.png'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "short.png").stat().st_size > 10_000
    return json.loads(done.stdout)


def cells(record, **wanted):
    return [cell for cell in record["cells"] if all(cell[key] == value for key, value in wanted.items())]


def test_every_cell_writes_the_traces_text_and_tells_all_figures(record):
    assert record["identical"] is True
    assert [(cell["mode"], cell["tls"]) for cell in record["cells"]] == [
        ("cloud", False), ("async", False), ("colocated_sync", False), ("colocated_async", False),
        ("cloud", True), ("async", True),
    ]  # fmt: skip
    for cell in record["cells"]:
        assert cell["identical"] is True and cell["tokens"] == 32
        assert all(isinstance(cell[name], float) for name in FIGURES)
    assert record["traces"] == ["short.json"] and record["prompt_tokens"] == [20]
    assert record["board"]["pass_ms"] == 12 and record["cloud"]["step_ms"] == STEP_MS
    assert record["machine"]["versions"]["python"]


def test_cloud_alone_takes_a_step_a_token_and_drafts_save_steps(record):
    for cell in cells(record, mode="cloud"):
        assert cell["cloud_steps_per_token"] == 1.0 and cell["drafts_per_token"] == 0.0
        assert STEP_MS <= cell["itl_ms_mean"] < 2 * STEP_MS
        assert cell["first_token_ms"] > STEP_MS + 20
    for cell in cells(record, mode="async"):
        assert cell["cloud_steps_per_token"] < 0.7
        assert cell["drafts_per_token"] > 0.1


def test_the_wire_carries_more_than_the_application_says_and_tls_more_than_plain(record):
    for mode in ("cloud", "async"):
        (plain,), (encrypted,) = cells(record, mode=mode, tls=False), cells(record, mode=mode, tls=True)
        for way in ("up", "down", "both"):
            assert plain["wire_bytes_per_token"][way] > plain["application_bytes_per_token"][way] > 0
            assert encrypted["wire_bytes_per_token"][way] > plain["wire_bytes_per_token"][way]


def test_the_colocated_drafter_has_no_link_to_count_at_and_its_best_draft_length(record):
    for cell in cells(record, rtt_ms=0.0):
        assert cell["wire_bytes_per_token"] is None
    (sync,) = cells(record, mode="colocated_sync")
    assert sync["gamma"] >= 1


def test_traces_or_real_models_but_not_both(tmp_path):
    done = bench("--real", f"--traces={tmp_path / 'any.json'}")
    assert done.returncode == 2 and "--traces" in done.stderr


def test_a_missing_trace_file_is_named(tmp_path):
    done = bench(f"--traces={tmp_path / 'gone.json'}")
    assert done.returncode == 78 and "gone.json" in done.stderr and not done.stdout


def test_waits_end_at_their_time_whatever_the_call_does():
    script = Script(independent_trace(0.8, 8, seed=3))
    drafter = TimedDrafter([script], BoardTiming(pass_s=0.03, row_share=0.5, prefill_tokens_per_s=1000.0))
    started = time.perf_counter()
    root = drafter.prefill(script.prompt)
    assert time.perf_counter() - started == pytest.approx(0.02, abs=0.01)
    started = time.perf_counter()
    drafter.extend([(1, root), (2, 0)])
    assert time.perf_counter() - started == pytest.approx(0.045, abs=0.01)
    engine = TimedEngine([script], StepTime(step_s=0.03))
    engine.open(1, script.prompt, Sampling(), 64)
    outcome = engine.step(Plan([Work(1, engine.pending(1))]))
    assert outcome.accepted == {1: [script.trace.target[0]]}
    assert outcome.seconds == pytest.approx(0.03, abs=0.01)


def test_time_between_tokens_counts_from_the_first_delivery():
    arrivals = [(1.0, 5), (1.2, 1), (1.6, 4)]
    assert gaps_ms(arrivals) == pytest.approx([200, 100, 100, 100, 100])
    assert mean_gap_ms(arrivals) == pytest.approx(120)
    assert mean_gap_ms(arrivals[:1]) == 0.0
