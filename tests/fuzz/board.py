"""The board's library, through what a drafter calls: rankings against their twin, a decoder's files, its passes."""

from __future__ import annotations

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.drafters import container
from edge.drafters.cached import CachedDrafter, Row
from edge.drafters.manifest import Manifest
from edge.drafters.native import PANEL, NativeForward, Shape
from edge.drafters.rank import by_twin, rank
from native import board
from protocol.errors import ModelError, SamplingError
from protocol.sampling import Sampling
from tests.fuzz.choices import Choices

SHAPE = Shape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=50, head=64, bits=4, kv_bits=8, group=32,
    head_bits=8, head_group=64, embedding_bits=4, embedding_group=32, zero_steps=16,
    epsilon=1e-5,
)  # fmt: skip
CONTEXT = 40  # tokens that the tables of the file reach
CAPACITY = 32
SETS = ("scalar", "avx2", "avx512", "neon", "dotprod")
VALUES = (0.0, -0.0, 1.0, -1.5, 2.0, 30.0, -80.0, 3e38, -3e38, 1e-45, -math.inf, math.inf, math.nan)
TEMPERATURES = (0.0, 1.0, 0.7, 16.0, 1e-3, 1e-30, 1e-300, 5e-324)
TOP_PS = (1.0, 0.5, 0.95, 1e-300, 1 - 2**-53)
TOP_KS = (0, 1, 3, 40, 2**31 - 1)
FACTS = (0, 1, 2, -1, 16, 32, 64, 128, 1 << 20, (1 << 24) - 16, 1 << 31, 1 << 40, "x", "nan", 0.5)

# A ranking, a story of a decoder, and a file with each of some places changed.
SEEDS = (
    bytes(range(60)),
    bytes([1, 0, 2, 3, 1, 2, 3, 1, 4, 5, 0, 0, 2, 2, 0, 3, 1, 0, 5, 6, 2, 9, 1, 1, 2, 0, 0]),
    bytes([1, 1, 0, 5, 9, 8, 7, 6, 5, 1, 3, 0, 1, 1, 2, 2, 1, 3, 3, 2, 1, 0, 3, 2, 2]),
    *(
        bytes([2, kind, 1, place, 3, value])
        for kind in range(4)
        for place in range(0, 250, 31)
        for value in (0, 9, 255)
    ),
)


def fuzz(data: bytes) -> None:
    choices = Choices(data)
    (_ranking, _decoding, _file)[choices.below(3)](choices)


def use_any(choices: Choices) -> None:
    """Take one of the instruction sets that are here."""
    _, lib = board.load()
    here = [isa for isa in SETS if lib.board_use(isa.encode()) == 0]
    lib.board_use(here[choices.below(len(here))].encode())


def _ranking(choices: Choices) -> None:
    use_any(choices)
    sampling = Sampling(
        temperature=TEMPERATURES[choices.below(len(TEMPERATURES))],
        top_k=TOP_KS[choices.below(len(TOP_KS))],
        top_p=TOP_PS[choices.below(len(TOP_PS))],
        seed=choices.below(256) << choices.below(57),
    )
    position, n = choices.below(256) << choices.below(57), 1 + choices.below(256)
    size, few = 1 + choices.below(256), choices.below(2)
    ids = np.cumsum([1 + choices.below(9) for _ in range(size)], dtype=np.int32) if few else None
    logits = np.array([choices.below(256) / 16 for _ in range(size)], np.float32)
    for place in choices.several(8, size):
        logits[place] = VALUES[choices.below(len(VALUES))]
    with np.errstate(all="ignore"):
        try:
            expected = by_twin(logits, position, sampling, n, ids)
        except SamplingError:
            expected = None
    try:
        found = rank(logits, position, sampling, n, ids)
    except SamplingError:
        assert expected is None, "the twin found tokens to choose from"
        return
    assert expected is not None, "the twin found none to choose from"
    assert found[0].tolist() == expected[0].tolist(), f"{sampling}: {found[0]}, by the twin {expected[0]}"
    assert np.allclose(found[1], expected[1], rtol=1e-9, atol=1e-12)


# -- the decoder ------------------------------------------------------------------------------------------------------


@cache
def model() -> bytes:
    """A small model's file."""
    s, rng = SHAPE, np.random.default_rng(1)
    tensors: dict[str, Any] = {"norm": np.ones(s.hidden, np.float32)}
    for name in ("cos", "sin"):
        tensors[name] = rng.uniform(-1, 1, (CONTEXT, s.head_dim // 2)).astype(np.float32)

    def matrix(name: str, n: int, k: int, bits: int, group: int, *, by_rows: bool = False) -> None:
        packed = (n, k * bits // 8) if by_rows else (n // PANEL, k * bits // 32, PANEL, 4)
        grouped = (n, k // group) if by_rows else (n // PANEL, k // group, PANEL)
        tensors[f"{name}.packed"] = rng.integers(256, size=packed).astype(np.uint8)
        tensors[f"{name}.scales"] = rng.uniform(0.001, 0.02, grouped).astype(np.float16)
        tensors[f"{name}.zeros"] = rng.integers(256, size=grouped).astype(np.uint8)

    matrix("embedding", s.vocab, s.hidden, s.embedding_bits, s.embedding_group, by_rows=True)
    matrix("head", s.head, s.hidden, s.head_bits, s.head_group)
    for i in range(s.layers):
        for name in ("attention_norm", "mlp_norm"):
            tensors[f"{i}.{name}"] = np.ones(s.hidden, np.float32)
        matrix(f"{i}.queries", s.heads * s.head_dim, s.hidden, s.bits, s.group)
        matrix(f"{i}.kv", 2 * s.kv_heads * s.head_dim, s.hidden, s.kv_bits, s.group)
        matrix(f"{i}.out", s.hidden, s.heads * s.head_dim, s.bits, s.group)
        matrix(f"{i}.gate", s.inner, s.hidden, s.bits, s.group)
        matrix(f"{i}.up", s.inner, s.hidden, s.bits, s.group)
        matrix(f"{i}.down", s.hidden, s.inner, s.bits, s.group)
    names = {np.dtype(dtype): name for name, dtype in container.TYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {name: str(getattr(s, name)) for name in s.__struct_fields__}}
    at = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": names[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (at, at + tensor.nbytes),
        }
        at += tensor.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % container.ALIGNMENT)
    return len(header).to_bytes(8, "little") + header + b"".join(tensor.tobytes() for tensor in tensors.values())


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="outrider-fuzz-"))
    (made / "whole").write_bytes(model())
    return made


def opened(path: Path, threads: int) -> CachedDrafter:
    facts = Manifest(
        kind="drafter", name="fuzzed", architecture="llama", source={}, weights_digest="", tokenizer_digest="",
        vocab_size=SHAPE.vocab, context=CONTEXT, dtype="float32", stop_ids=(), chat_template="", runtime="native",
    )  # fmt: skip
    return CachedDrafter(NativeForward(path, threads, CAPACITY, huge_pages=True), facts)


def _decoding(choices: Choices) -> None:
    """Whatever is evaluated and kept, the logits are those of the whole text anew, but for the order of sums."""
    use_any(choices)
    drafter = opened(folder() / "whole", 1 + choices.below(3))
    text = [choices.below(SHAPE.vocab) for _ in range(1 + choices.below(20))]
    last, tree = drafter.prefill(text), []
    while choices.left:
        match choices.below(4):
            case 0:
                text = [choices.below(SHAPE.vocab) for _ in range(1 + choices.below(CAPACITY))]
                last, tree = drafter.prefill(text), []
            case 1 if drafter.room():
                above = [last, *tree]
                rows = [
                    (choices.below(SHAPE.vocab), above[choices.below(len(above))])
                    for _ in range(1 + choices.below(min(drafter.room(), 12)))
                ]
                tree += drafter.extend(rows)
                _compare(drafter, text, tree[-1])
            case 2 if tree:
                path = _branch(tree[choices.below(len(tree))], last)
                drafter.keep(path)
                text, last = [*text, *(row.id for row in path)], path[-1]
                tree = [row for row in tree if row.slot >= 0 and row is not last]
            case _:
                ids = [choices.below(64) - 4 for _ in range(choices.below(4))]
                _misuse(drafter, ids, choices)


def _branch(row: Row | None, last: Row) -> list[Row]:
    """From the child of the text's last row on."""
    found: list[Row] = []
    while row is not None and row is not last:
        found.append(row)
        row = row.parent
    return found[::-1]


def _compare(drafter: CachedDrafter, text: list[int], row: Row) -> None:
    whole = [*text, *(above.id for above in _branch(row, drafter._last))]
    if len(whole) <= CAPACITY:
        anew = opened(folder() / "whole", 1)
        found, expected = drafter.logits(row), anew.logits(anew.prefill(whole))
        assert np.allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max()), (whole, found, expected)


def _misuse(drafter: CachedDrafter, ids: list[int], choices: Choices) -> None:
    """What is out of range is refused, and changes nothing."""
    forward, start = drafter._forward, choices.below(80) - 8
    bad = [id for id in ids if not 0 <= id < SHAPE.vocab]
    if bad or not ids or not 0 <= start <= forward.capacity - len(ids):
        try:
            forward.run(ids, range(len(ids)), start, [], None)
        except ValueError:
            return
        raise AssertionError(f"{ids} at slot {start} were evaluated")


def _file(choices: Choices) -> None:
    """A damaged file is refused, or holds another model: nothing else happens."""
    content = bytearray(model())
    header = 8 + int.from_bytes(content[:8], "little")
    match choices.below(4):
        case 0:
            del content[len(content) * choices.below(256) // 256 :]
        case 1:
            for _ in range(1 + choices.below(4)):
                content[header * choices.below(256) // 256 + choices.below(32)] = choices.below(256)
        case 2:
            entries = json.loads(content[8:header])
            names = sorted(entries["__metadata__"])
            entries["__metadata__"][names[choices.below(len(names))]] = str(FACTS[choices.below(len(FACTS))])
            made = json.dumps(entries).encode()
            content = bytearray(len(made).to_bytes(8, "little") + made + content[header:])
        case _:
            for _ in range(1 + choices.below(16)):
                at = header + (len(content) - header) * choices.below(256) // 256
                content[at + choices.below(64) - 64] = choices.below(256)
    path = folder() / "damaged"
    path.write_bytes(content)
    try:
        drafter = opened(path, 1)
    except ModelError:
        return
    row = drafter.prefill([id for id in (1, 2, 3) if id < SHAPE.vocab])
    drafter.extend([(4, row), (5, row), (6, 0)])
