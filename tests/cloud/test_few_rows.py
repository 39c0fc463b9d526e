"""Attention in C beside its twin in torch: the same numbers, but for rounding, whatever the shape of a step."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import native  # noqa: E402
from cloud.engines import few_rows  # noqa: E402
from cloud.engines.kv import KvShape, Slab  # noqa: E402
from cloud.engines.ragged import AttentionShape, Span, attend, lay_out  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, LAYER = 2, 1


@pytest.fixture(autouse=True)
def compiler() -> None:
    if not few_rows.rows_at_once(torch.float32, 1, 64):
        if os.environ.get("OUTRIDER_REQUIRE_NATIVE"):
            pytest.fail("the library cannot be built here")
        pytest.skip("no C compiler here")


def step(
    spans: list[tuple[int, int, tuple[int, ...]]], key_heads: int, groups: int, width: int, few: int, seed: int = 0
) -> tuple[Any, list[Any]]:
    """What attention gives for spans of (past, chunk, parents), and what then lies in their slabs."""
    generator = torch.Generator().manual_seed(seed)
    made, start = [], 0
    for past, chunk, parents in spans:
        slab = Slab(KvShape(LAYERS, key_heads, width, torch.float32), past + chunk + 2 * len(parents) + 64)
        slab.top = past + chunk + len(parents)
        slab.kv[:, :, :, :past] = torch.randn(LAYERS, 2, key_heads, past, width, generator=generator)
        made.append(Span(slab, start, past, chunk, parents))
        start += made[-1].rows
    query, key, value = (
        torch.randn(1, heads, start, width, generator=generator) for heads in (key_heads * groups, key_heads, key_heads)
    )
    layout = lay_out(made, AttentionShape(groups, few=few), torch.float32, start)
    assert (layout.few is not None) == bool(few)
    out, _ = attend(SimpleNamespace(layer_idx=LAYER), 3 * query, key, value, None, layout=layout)
    return out, [span.slab.kv.clone() for span in made]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("key_heads", "groups", "width"), [(3, 3, 64), (2, 6, 128), (4, 1, 80), (1, 8, 16)])
def test_it_agrees_with_torch(key_heads: int, groups: int, width: int, threads: int) -> None:
    lots = random.Random(width)
    tree = tuple(lots.randrange(-1, i) if i else -1 for i in range(9))
    spans = [
        (0, 1, ()),
        (5, 1, (-1, 0, 1, 2)),
        (200, 1, tree),
        (63, 1, ()),
        (64, 3, (-1, 0)),
        (127, 2, (-1, -1, 0, 0)),
        (30, 90, ()),  # too long: it goes the other way, in the same step
        (511, 1, (-1,)),
    ]
    torch.set_num_threads(threads)
    try:
        found, slabs = step(spans, key_heads, groups, width, few=16)
    finally:
        torch.set_num_threads(1)
    expected, expected_slabs = step(spans, key_heads, groups, width, few=0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for slab, other in zip(slabs, expected_slabs, strict=True):
        assert torch.equal(slab, other)


def test_scores_of_any_size_are_weighed_right() -> None:
    """The running maximum rises and falls from block to block, and most weights vanish."""
    for seed in range(5):
        found, _ = step([(400, 1, (-1, 0))], 2, 2, 64, few=4, seed=seed)
        expected, _ = step([(400, 1, (-1, 0))], 2, 2, 64, few=0, seed=seed)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_one_session_s_not_a_number_stays_its_own() -> None:
    slabs = [Slab(KvShape(1, 2, 64, torch.float32), 64) for _ in range(2)]
    for slab in slabs:
        slab.kv[:, :, :, :20] = torch.randn(1, 2, 2, 20, 64)
    slabs[1].kv[0, 0, :, 7] = float("nan")
    layout = lay_out(
        [Span(slab, i, 20, 1, ()) for i, slab in enumerate(slabs)], AttentionShape(2, few=4), torch.float32, 2
    )
    query, key, value = torch.randn(1, 4, 2, 64), torch.randn(1, 2, 2, 64), torch.randn(1, 2, 2, 64)
    out, _ = attend(SimpleNamespace(layer_idx=0), query, key, value, None, layout=layout)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()


def test_shapes_that_the_library_has_no_room_for_go_the_other_way() -> None:
    assert few_rows.rows_at_once(torch.bfloat16, 1, 64) == 0
    assert few_rows.rows_at_once(torch.float32, 1, 512) == 0
    assert few_rows.rows_at_once(torch.float32, 64, 64) == 2


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.load.__wrapped__("attention") is None


def test_a_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.load.__wrapped__("attention") is not None
    [made] = (tmp_path / "outrider").iterdir()
    at = made.stat().st_mtime_ns
    assert native.load.__wrapped__("attention") is not None
    assert made.stat().st_mtime_ns == at


def test_a_source_that_does_not_compile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-no-such-flag-of-any-compiler",))
    assert shutil.which("cc") is not None
    assert native.load.__wrapped__("attention") is None
    assert "cannot be built" in caplog.text
    assert not list((tmp_path / "outrider").iterdir()), "nothing is left behind"
