"""Products in C: what `F.linear` gives, and for a row the same bits in any company and on any number of threads."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cloud.engines.huge_pages import Arena  # noqa: E402
from cloud.engines.product import PanelLinear, has_panels, panels_shape  # noqa: E402


@pytest.fixture(autouse=True)
def built() -> None:
    if not has_panels(torch.float32):
        assert os.environ.get("OUTRIDER_REQUIRE_NATIVE") != "1", "native/product.c was not built"
        pytest.skip("no C compiler")


def both(width: int, out: int, bias: bool) -> tuple[nn.Linear, PanelLinear]:
    torch.manual_seed(width + out)
    linear = nn.Linear(width, out, bias=bias)
    return linear, PanelLinear(linear, Arena(Arena.room(panels_shape(linear), torch.float32)))


@pytest.mark.parametrize(("width", "out", "bias"), [(576, 960, False), (100, 70, True), (1, 1, True), (33, 32, False)])
def test_it_is_the_twins_product(width: int, out: int, bias: bool) -> None:
    linear, panel = both(width, out, bias)
    with torch.inference_mode():
        for rows in (1, 2, 3, 7, 12, 13, 25, 64):
            x = torch.randn(rows, width)
            torch.testing.assert_close(panel(x), linear(x), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() -> None:
    _, panel = both(576, 200, True)
    x = torch.randn(64, 576)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        alone = torch.cat([panel(row[None]) for row in x])
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                for rows in range(1, 65):
                    assert torch.equal(panel(x[:rows]), alone[:rows])
                    assert torch.equal(panel(x[64 - rows :]), alone[64 - rows :])
        finally:
            torch.set_num_threads(threads)


def test_rows_may_lie_apart_and_in_batches() -> None:
    linear, panel = both(96, 64, True)
    wide = torch.randn(2, 5, 200)
    with torch.inference_mode():
        for x in (wide[..., 50:146], wide[..., ::2][..., :96], wide[:0, :, :96]):
            assert panel(x).shape == linear(x).shape
            torch.testing.assert_close(panel(x), linear(x), rtol=1e-5, atol=1e-5)
