"""The native drafter: the decoder in `native/board`, over a mapped file. The same bits on every board, at any number of
threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.drafters import container, manifest, shortlist
from edge.drafters.cached import DEFAULT_CONTEXT, CachedDrafter, Seen
from native import board
from protocol.errors import ModelError

PANEL = 16
BY_ROWS = ("embedding", "cos", "sin")  # tensors of which a pass reads a few rows, not all
ZERO_STEPS = 16  # of a level of four bits, into which its zero point may fall


class Shape(msgspec.Struct, frozen=True):
    """Of a model, as the file's metadata says.

    bits, group: of the layers' products; kv_bits: of those that make keys and values; epsilon: of the norms.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    head: int
    bits: int
    kv_bits: int
    group: int
    head_bits: int
    head_group: int
    embedding_bits: int
    embedding_group: int
    zero_steps: int
    epsilon: float

    def problem(self) -> str:
        """Why the decoder cannot take it; "" where it can."""
        sizes = {name: getattr(self, name) for name in self.__struct_fields__ if name != "epsilon"}
        if bad := [name for name, size in sizes.items() if not 0 < size < 1 << 24]:
            return f"{bad[0]} is {sizes[bad[0]]}"
        if self.heads % self.kv_heads or self.head_dim % 16 or self.hidden % 16 or self.inner % 16 or self.head % PANEL:
            return f"sizes {sizes} do not fit panels of {PANEL}"
        if self.zero_steps != ZERO_STEPS:
            return f"zero points in steps of 1/{self.zero_steps}"
        for bits, group in (
            (self.bits, self.group),
            (self.kv_bits, self.group),
            (self.head_bits, self.head_group),
            (self.embedding_bits, self.embedding_group),
        ):
            if bits not in (4, 8) or group not in (32, 64, 128):
                return f"{bits} bits in groups of {group}"
        if self.hidden % max(self.group, self.head_group, self.embedding_group) or self.inner % self.group:
            return f"groups of {self.group} do not divide {self.hidden} and {self.inner}"
        if self.heads * self.head_dim % self.group:
            return f"groups of {self.group} do not divide {self.heads * self.head_dim}"
        return ""


class NativeDrafter(CachedDrafter):
    """A `Drafter` for a directory that `python -m tools.export drafter --runtime native` wrote."""

    @classmethod
    def load(
        cls,
        directory: str | Path,
        threads: int = 1,
        context: int | None = None,
        *,
        verify: bool = False,
        huge_pages: bool = True,
    ) -> NativeDrafter:
        """Map a model directory. context, verify, huge_pages: as `edge.drafters.runtimes.load` takes them.

        Raises ModelError for a file that is missing, corrupt or not the manifest's, NativeError without the library.
        """
        directory = Path(directory)
        facts = manifest.read(directory, "drafter", verify=verify)
        path = directory / facts.weights_files[0]
        forward = NativeForward(path, threads, min(context or DEFAULT_CONTEXT, facts.context), huge_pages=huge_pages)
        if forward.shape.vocab < facts.vocab_size:
            raise ModelError(
                f"{forward.shape.vocab} ids where the tokenizer has {facts.vocab_size}",
                where=str(path),
                remedy="export the model again",
            )
        return cls(forward, facts, shortlist.read(directory, facts))


class NativeForward:
    """A `Forward` over the C decoder. Raises ModelError for a file that it cannot take."""

    def __init__(self, path: Path, threads: int, capacity: int, *, huge_pages: bool) -> None:
        self._ffi, self._lib = board.load()
        self._file = container.read(path, huge=lambda name: huge_pages and not name.startswith(BY_ROWS))
        self._held: list[Any] = []  # what the C side points to
        try:
            self.shape = msgspec.convert(dict(self._file.metadata), Shape, strict=False)
            if problem := self.shape.problem():
                raise ValueError(problem)
            model = self._model()
        except (KeyError, ValueError) as error:  # msgspec's own are ValueErrors
            raise ModelError(
                f"not a drafter for this decoder: {error}", where=str(path), remedy="export the model again"
            ) from error
        self._held.append(model)
        capacity = min(capacity, model.context)
        self._decoder = self._lib.board_decoder_alloc(model, capacity, threads)
        if self._decoder == self._ffi.NULL:
            raise ModelError(
                f"no memory for {capacity} tokens, or no {threads} threads",
                where=str(path),
                remedy="set a smaller `context` or fewer `threads` in [drafter]",
            )
        weakref.finalize(self, self._lib.board_decoder_free, self._decoder)
        self.capacity = capacity
        self.provider = f"native ({self._ffi.string(self._lib.board_isa()).decode()})"
        self._most_rows = self._lib.board_most_rows()

    def run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> np.ndarray:
        """See `Forward.run`. More rows than the decoder takes at once go in several passes."""
        if len(ids) <= self._most_rows:
            return self._run(ids, positions, start, wanted, tree)
        parts = []
        for first in range(0, len(ids), self._most_rows):
            end = min(first + self._most_rows, len(ids))
            seen = None if tree is None else tree[first:end, : tree.shape[1] - (len(ids) - end)]
            here = [row - first for row in wanted if first <= row < end]
            parts.append(self._run(ids[first:end], positions[first:end], start + first, here, seen).copy())
        return np.concatenate(parts)

    def _run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> np.ndarray:
        ffi = self._ffi
        seen, behind = ffi.NULL, 0
        if tree is not None:
            behind = tree.shape[1]
            seen = ffi.from_buffer("uint8_t[]", np.ascontiguousarray(tree))
        rows = ffi.new("int32_t[]", list(ids)), ffi.new("int32_t[]", list(positions))
        asked = ffi.new("int32_t[]", list(wanted))
        found = self._lib.board_decoder_run(self._decoder, len(ids), *rows, start, seen, behind, len(wanted), asked)
        if found == ffi.NULL:
            raise ValueError(f"{len(ids)} rows at slot {start} of {self.capacity} do not fit the model")
        width = self.shape.head
        floats = np.frombuffer(ffi.buffer(found, max(1, len(wanted)) * width * 4), np.float32)
        return floats[: len(wanted) * width].reshape(len(wanted), width)

    def move(self, slots: Sequence[int], first: int) -> None:
        """See `Forward.move`."""
        if self._lib.board_decoder_move(self._decoder, len(slots), self._ffi.new("int32_t[]", list(slots)), first):
            raise ValueError(f"slots {list(slots)} cannot be moved to {first}")

    # -- what the C side points to ------------------------------------------------------------------------------------

    def _tensor(self, name: str, dtype: type, *shape: int) -> np.ndarray:
        found = self._file.tensors[name]
        if found.dtype != dtype or found.shape != shape:
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, not {np.dtype(dtype)} {list(shape)}")
        return found

    def _pointer(self, kind: str, array: np.ndarray) -> Any:
        pointer = self._ffi.from_buffer(f"{kind}[]", array)
        self._held.append(pointer)
        return pointer

    def _floats(self, name: str, *shape: int) -> Any:
        return self._pointer("float", self._tensor(name, np.float32, *shape))

    def _matrix(self, name: str, n: int, k: int, bits: int, group: int, *, by_rows: bool = False) -> dict[str, Any]:
        per, groups, panels = 8 // bits, k // group, n // PANEL
        packed = (n, k // per) if by_rows else (panels, k // (4 * per), PANEL, 4)
        grouped = (n, groups) if by_rows else (panels, groups, PANEL)
        return {
            "n": n,
            "k": k,
            "bits": bits,
            "group": group,
            "packed": self._pointer("uint8_t", self._tensor(f"{name}.packed", np.uint8, *packed)),
            "scales": self._pointer("uint16_t", self._tensor(f"{name}.scales", np.float16, *grouped).view(np.uint16)),
            "zeros": self._pointer("uint8_t", self._tensor(f"{name}.zeros", np.uint8, *grouped)),
            "bias": self._floats(f"{name}.bias", n) if f"{name}.bias" in self._file.tensors else self._ffi.NULL,
        }

    def _model(self) -> Any:
        s = self.shape
        attended = s.heads * s.head_dim
        sizes = {
            "queries": (attended, s.hidden),
            "kv": (2 * s.kv_heads * s.head_dim, s.hidden),
            "out": (s.hidden, attended),
            "gate": (s.inner, s.hidden),
            "up": (s.inner, s.hidden),
            "down": (s.hidden, s.inner),
        }
        layers = self._ffi.new("board_layer[]", s.layers)
        for i, layer in enumerate(layers):
            layer.attention_norm = self._floats(f"{i}.attention_norm", s.hidden)
            layer.mlp_norm = self._floats(f"{i}.mlp_norm", s.hidden)
            for name, size in sizes.items():
                bits = s.kv_bits if name == "kv" else s.bits
                setattr(layer, name, self._matrix(f"{i}.{name}", *size, bits, s.group))
        self._held.append(layers)
        context = len(self._file.tensors["cos"])
        return self._ffi.new(
            "board_model *",
            {
                "layers": s.layers,
                "hidden": s.hidden,
                "heads": s.heads,
                "kv_heads": s.kv_heads,
                "head_dim": s.head_dim,
                "inner": s.inner,
                "vocab": s.vocab,
                "context": context,
                "epsilon": s.epsilon,
                "embedding": self._matrix(
                    "embedding", s.vocab, s.hidden, s.embedding_bits, s.embedding_group, by_rows=True
                ),
                "head": self._matrix("head", s.head, s.hidden, s.head_bits, s.head_group),
                "norm": self._floats("norm", s.hidden),
                "cos": self._floats("cos", context, s.head_dim // 2),
                "sin": self._floats("sin", context, s.head_dim // 2),
                "layer": layers,
            },
        )
