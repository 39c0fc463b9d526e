"""The decoder: products to the bit as their twin in NumPy, logits as torch's, and the same bits everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.drafters import container
from edge.drafters.native import NativeDrafter
from native import board
from protocol.errors import ModelError

pytest.importorskip("torch", reason="a tiny model is made with torch")

import torch

from tests.native.twin import product
from tests.tools import tiny_models
from tools.export import packed, sources, write
from tools.export.quantise import Blocks, dequantise, quantise
from tools.export.quantised import Options, quantise_model

PROMPT = [1, 30, 99, 7, 205, 44, 18]


@pytest.fixture(scope="module", params=("llama", "qwen2"))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(source, directory) of a tiny model."""
    where = tmp_path_factory.mktemp("native")
    source = sources.read(str(tiny_models.directory(where / "hf", request.param)))
    write.write_drafter(source, where / "out", Options(runtime="native"))
    return source, where / "out"


def multiplied(library: tuple[Any, Any], blocks: Blocks, tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The library's product of x [rows, k] with the matrix "m" of `tensors`, float32 [rows, n]."""
    ffi, lib = library
    matrix = ffi.new(
        "board_matrix *",
        {
            "n": blocks.n, "k": blocks.k, "bits": blocks.bits, "group": blocks.group,
            "packed": ffi.from_buffer("uint8_t[]", tensors["m.packed"]),
            "scales": ffi.from_buffer("uint16_t[]", tensors["m.scales"].view(np.uint16)),
            "zeros": ffi.from_buffer("uint8_t[]", tensors["m.zeros"]),
            "bias": ffi.from_buffer("float[]", tensors["m.bias"]),
        },
    )  # fmt: skip
    y = np.full((len(x), blocks.n), np.nan, np.float32)
    lib.board_product(matrix, len(x), ffi.from_buffer("float[]", x), ffi.from_buffer("float[]", y))
    return y


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("symmetric", (True, False))
def test_a_product_is_its_twin_to_the_bit(
    isa: str, library: tuple[Any, Any], bits: int, group: int, symmetric: bool
) -> None:
    generator = torch.Generator().manual_seed(bits * group)
    weight = torch.randn(48, 256, generator=generator)
    weight[:, 5] *= 30  # a channel that stands out
    blocks = quantise(weight, bits, group, symmetric, 16 if bits == 4 else 1)
    x = np.random.default_rng(group).normal(0, 3, (11, 256)).astype(np.float32)
    x[3] = 0
    x[4] *= 1e-20
    x[5, 17] = 1e6
    tensors = dict(packed.matrix("m", blocks, torch.randn(48, generator=generator)))
    y = multiplied(library, blocks, tensors, x)
    np.testing.assert_array_equal(y, product(x, blocks, tensors["m.bias"]))
    values = dequantise(blocks).double().numpy()
    exact = x.astype(np.float64) @ values.T + tensors["m.bias"]
    step = np.abs(x).max(1, keepdims=True) / 65000  # half of fixed point's step, where a row's greatest value is
    assert (np.abs(y - exact) <= step * np.abs(values).sum(1) + 1e-5 * np.abs(exact) + 1e-5).all()


def test_what_is_no_number_counts_as_its_groups_greatest_and_harms_no_other_row(
    isa: str, library: tuple[Any, Any]
) -> None:
    """Or an infinity of a damaged file would be another integer on another processor."""
    blocks = quantise(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), 4, 32, False, 16)
    tensors = dict(packed.matrix("m", blocks, torch.zeros(16)))
    x = np.random.default_rng(2).normal(0, 3, (3, 64)).astype(np.float32)
    x[0, 3] = np.nan
    x[1, 40] = np.inf
    y = multiplied(library, blocks, tensors, x)
    x[0, 3] = -np.nanmax(np.abs(x[0, :32]))
    np.testing.assert_array_equal(y[[0, 2]], product(x[[0, 2]], blocks, tensors["m.bias"]))
    assert not np.isfinite(y[1]).any()


@pytest.mark.parametrize("bits", (4, 8))
def test_logits_are_those_of_the_dequantised_model(bits: int, exported: tuple[Any, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, options = exported[0], Options(runtime="native", bits=bits)
    write.write_drafter(source, tmp_path / "out", options)
    blocks = quantise_model(source.config, source.weights, options)
    weights = {name: dequantise(blocks[name]) if name in blocks else value for name, value in source.weights.items()}
    weights["lm_head.weight"] = dequantise(blocks["lm_head.weight"])
    source.config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(source.config)
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPT])).logits[0, -1].numpy()
    drafter = NativeDrafter.load(tmp_path / "out")
    found = drafter.logits(drafter.prefill(PROMPT))
    np.testing.assert_allclose(found, expected[: len(found)], rtol=2e-3, atol=2e-3)


def test_bits_depend_on_neither_set_nor_threads_nor_rows(isa: str, exported: tuple[Any, Path]) -> None:
    """Against plain C on one thread, one row a pass."""
    _, directory = exported
    alone = scalar_logits(directory)
    for threads in (1, 3):
        drafter = NativeDrafter.load(directory, threads=threads)
        assert isa in drafter.info.provider
        rows = drafter.extend([(50 + i, i - 1 if i else drafter.prefill(PROMPT)) for i in range(9)])
        np.testing.assert_array_equal(np.stack([drafter.logits(row) for row in rows]), alone)


SCALAR: dict[Path, np.ndarray] = {}


def scalar_logits(directory: Path) -> np.ndarray:
    if directory not in SCALAR:
        ffi, lib = board.load()
        before = ffi.string(lib.board_isa())
        assert lib.board_use(b"scalar") == 0
        drafter = NativeDrafter.load(directory)
        row = drafter.prefill(PROMPT)
        found = []
        for i in range(9):
            (row,) = drafter.extend([(50 + i, row)])
            found.append(drafter.logits(row).copy())
        SCALAR[directory] = np.stack(found)
        assert lib.board_use(before) == 0
    return SCALAR[directory]


def test_more_rows_than_a_pass_takes(exported: tuple[Any, Path]) -> None:
    _, directory = exported
    drafter = NativeDrafter.load(directory)
    rows = drafter.extend([(i % 200, i - 1 if i else drafter.prefill(PROMPT)) for i in range(150)])
    fresh = NativeDrafter.load(directory)
    expected = fresh.logits(fresh.prefill([*PROMPT, *(i % 200 for i in range(150))]))
    np.testing.assert_allclose(drafter.logits(rows[-1]), expected, rtol=1e-4, atol=1e-4)


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        change(entries)
        made = json.dumps(entries).encode()
        made += b" " * (-(8 + len(made)) % container.ALIGNMENT)
        return len(made).to_bytes(8, "little") + made + content[8 + size :]

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda content: b"", "not a safetensors file: cannot mmap an empty file"),
        (lambda content: content[:5], "not a safetensors file"),
        (lambda content: (1 << 60).to_bytes(8, "little") + content[8:], "a header of 1152921504606846976 bytes"),
        (lambda content: content[:-100], r"bytes \d+ to \d+ are not"),
        (header(lambda entries: entries.pop("norm")), "'norm'"),
        (header(lambda entries: entries["norm"].update(dtype="F64")), "norm: F64"),
        (header(lambda entries: entries["norm"].update(data_offsets=[-64, 192])), "norm: bytes -64 to 192"),
        (header(lambda entries: entries.update({f"head.{i}": entries["head.packed"] for i in range(99)})), "overlap"),
        (
            header(lambda entries: entries["__metadata__"].update(hidden="32")),
            r"norm is float32 \[64\], not float32 \[32\]",
        ),
        (header(lambda entries: entries["__metadata__"].update(hidden="-64")), "hidden is -64"),
        (header(lambda entries: entries["__metadata__"].update(group="24")), "4 bits in groups of 24"),
        (header(lambda entries: entries["__metadata__"].update(kv_heads="3")), "do not fit"),
        (header(lambda entries: entries["__metadata__"].pop("epsilon")), "epsilon"),
    ],
)
def test_broken_files_are_named(
    exported: tuple[Any, Path], tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    copy = shutil.copytree(exported[1], tmp_path / "copy")
    path = copy / "drafter.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        NativeDrafter.load(copy)
