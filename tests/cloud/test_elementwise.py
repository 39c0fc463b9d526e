"""What runs between products in C, beside its twin in torch."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from cloud.engines.elementwise import Native, Torch, native, quickest  # noqa: E402


@pytest.fixture
def ours() -> Native:
    found = native()
    if found is None:
        if os.environ.get("OUTRIDER_REQUIRE_NATIVE"):
            pytest.fail("the library cannot be built here")
        pytest.skip("no C compiler here")
    return found


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (8, 576), (5, 100), (70, 1536)])
def test_norms_agree(ours: Native, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = 40 * torch.randn(rows, width, generator=generator)
    x[0] = 0
    weight = torch.randn(width, generator=generator)
    torch.testing.assert_close(ours.norm(x, weight, 1e-5), Torch.norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "turned", "width"), [(15, 12, 64), (4, 4, 128), (3, 2, 18)])
def test_rotations_agree_and_leave_the_other_heads_alone(ours: Native, heads: int, turned: int, width: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    rows = torch.randn(9, heads, width, generator=generator)
    cos, sin = (torch.randn(9, 1, width, generator=generator) for _ in range(2))
    before = rows.clone()
    expected = Torch.rotate(rows.clone(), turned, cos, sin)
    torch.testing.assert_close(ours.rotate(rows, turned, cos, sin), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(rows[:, turned:], before[:, turned:])


def test_what_is_not_a_number_stays_in_its_row(ours: Native) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    out = ours.norm(x, torch.ones(64), 1e-5)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


def test_exact_numerics_and_other_dtypes_keep_to_torch() -> None:
    assert isinstance(quickest(torch.float32, exact=True), Torch)
    assert isinstance(quickest(torch.bfloat16, exact=False), Torch)
