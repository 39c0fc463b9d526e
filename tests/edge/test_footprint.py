"""What a board's whole process takes, as real processes: what it imports, memory, CPU while it waits, and no growth.

What is measured here does not depend on how busy the machine is: CPU seconds, bytes and objects, no wall clock.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a tiny model is made with torch")

from edge.drafters import manifest, runtimes
from edge.memory import give_back, untouched
from tests.tools import tiny_models
from tools.bench.board import NEVER_S, BoardProcess, fleet
from tools.bench.process import cpu_s, memory_mib
from tools.export import sources, write
from tools.export.quantised import Options
from tools.models import ROOT

WAIT_S = 5.0
TEXT, TEXTS = 100, 24
CONTEXT = 1 << 16
CACHE_BYTES = 2 * 2 * 2 * 16 * 4  # of a token of the tiny model: key and value, layers, heads, width, float32
THP = Path("/sys/kernel/mm/transparent_hugepage")
UNWANTED = {
    "onnxruntime", "torch", "transformers", "onnx", "rich", "cryptography", "edge.checks", "edge.enroll",
    "edge.updates.service", "edge.drafters.onnx", "edge.drafters.litert", "edge.drafters.tensorrt",
}  # fmt: skip
SERVING = """
import json, sys
from pathlib import Path
from edge.cli import main
import edge.api
from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from edge.loading import load_drafter, load_text
config = EdgeConfig(device=DeviceConfig(name="test.board"), drafter=DrafterConfig(model=Path(sys.argv[1])))
load_drafter(config), load_text(config)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of a few thousand weights for the native runtime."""
    where = tmp_path_factory.mktemp("footprint")
    source = sources.read(str(tiny_models.directory(where / "hf", "llama")))
    write.write_drafter(source, where / "out", Options(runtime="native"))
    return where / "out"


def test_a_board_imports_only_what_it_serves_with(tiny: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", SERVING, str(tiny)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = json.loads(told.stdout)
    assert {"edge.api", "edge.drafters.native", "uvicorn"} <= set(modules)
    assert not UNWANTED & set(modules)


def test_a_board_that_waits_for_a_verdict_takes_five_per_cent_of_a_core_at_most(tiny: Path) -> None:
    with (
        fleet(tiny, "--step-s", str(NEVER_S)) as (stage, ear),
        BoardProcess(stage.folder, stage.broker(), tiny, threads=2, patience_s=float("inf")) as board,
    ):
        board.wait_listening()
        answer = board.ask(TEXT)
        ear.wait("draft", 60)
        time.sleep(1.0)  # until everything that may be guessed is guessed
        before = cpu_s(board.pid)
        time.sleep(WAIT_S)
        assert cpu_s(board.pid) - before <= 0.05 * WAIT_S
        answer.close()


def settled(board: BoardProcess) -> dict[str, int]:
    """The least of a few counts: what is only on its way out when one is taken does not count."""
    counts = []
    for _ in range(4):
        time.sleep(0.3)
        counts.append(board.count())
    return {name: min(count[name] for count in counts) for name in counts[0]}


def test_nothing_grows_with_the_texts(tiny: Path) -> None:
    with (
        fleet(tiny, "--step-s", "0.002", "--wrong-every", "6") as (stage, _),
        BoardProcess(
            stage.folder, stage.broker(), tiny, threads=1, patience_s=0.0, module=("-m", "tools.bench.watched_edge")
        ) as board,
    ):
        board.wait_listening()
        for text in range(TEXTS):
            board.ask(TEXT).read()
            if text == TEXTS // 2:
                held, memory = settled(board), memory_mib(board.pid)
        grown = {name: size - held[name] for name, size in settled(board).items()}
        assert grown["objects"] < 2 * TEXTS
        assert grown["kib"] < 64
        assert memory_mib(board.pid)["private"] - memory["private"] < 4


def test_a_board_with_smollm2_takes_250_mib_and_three_seconds_of_computing(smollm2: tuple[Path, Path]) -> None:
    drafter = smollm2[0]
    if (runtime := manifest.read(drafter, "drafter").runtime) != "native":
        pytest.skip(f"exported for {runtime}, which takes more")
    with fleet(drafter, "--step-s", "0.03") as (stage, ear):
        for _ in range(2):  # the first start fills the file cache
            ear.forget()
            with BoardProcess(stage.folder, stage.broker(), drafter, threads=2, patience_s=0.0) as board:
                board.wait_listening()
                answer = board.ask(TEXT)
                ear.wait("draft", 60)
                computed_s = cpu_s(board.pid)
                answer.read()
                found = memory_mib(board.pid)
    assert found["rss"] <= 250, found
    assert computed_s <= 3.0


def test_a_cache_takes_memory_as_it_fills() -> None:
    size = 256 << 20
    before = memory_mib(os.getpid())["rss"]
    cache = untouched(size)
    for place in range(0, size, size // 16):  # as the first token of sixteen heads
        cache[place] = 1
    assert memory_mib(os.getpid())["rss"] - before < 2
    assert cache[size // 16] == 1 and cache[1] == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was freed, and can be asked")
def test_what_was_freed_is_given_back() -> None:
    blocks = [bytes(1000) for _ in range(100_000)]
    kept = blocks[::1000]  # so that the heap cannot shrink from its end
    del blocks
    before = memory_mib(os.getpid())["rss"]
    give_back()
    assert before - memory_mib(os.getpid())["rss"] > 60
    assert len(kept) == 100


@pytest.mark.skipif(not THP.exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("runtime", ("native", "onnx"))
def test_a_drafter_pays_for_the_tokens_that_it_holds(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With huge pages, which some systems give unasked, the first token would take 2 MiB in each of eight heads."""
    if runtime == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.setitem(tiny_models.SHAPE, "max_position_embeddings", CONTEXT)
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    write.write_drafter(source, tmp_path / "out", Options(runtime=runtime))
    others = small_pages(CACHE_BYTES * CONTEXT)
    drafter = runtimes.load(tmp_path / "out", context=CONTEXT)
    before = memory_mib(os.getpid())["private"]
    drafter.extend([(7, drafter.prefill([5]))])
    assert memory_mib(os.getpid())["private"] - before < 8
    assert small_pages(CACHE_BYTES * CONTEXT) == others + 1


def small_pages(num_bytes: int) -> int:
    """Mappings of this process, of so many bytes at least, that are never to have huge pages."""
    found, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Size":
            size = int(rest.split()[0]) << 10
        elif name == "VmFlags":
            found += size >= num_bytes and "nh" in rest.split()
    return found
