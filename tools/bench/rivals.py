"""Rivals that all do the same: passes of a few rows behind a cached text, and a chain of guesses.

Threads must not fight: a rival may let its threads spin while it works, so whoever measures rests before each turn
until they sleep (`REST_S`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from edge.drafters import manifest, runtimes
from edge.drafters.base import Candidate
from edge.drafters.cached import CachedDrafter, Row
from protocol.sampling import Sampling
from tools.bench import reads

CONTEXT = 128
TEXT = tuple(range(5, 5 + CONTEXT))
ROWS = (1, 2, 4, 8)
BURST = 4  # passes one after the other, as a board drafts
CHAIN = 24
REST_S = 0.03  # longer than any rival's threads spin for more work
GREEDY = Sampling()


class Rival(Protocol):
    """about: what it is, for the record; read_bytes: of weights, cache and tables that a pass of one row reads."""

    about: dict[str, object]
    read_bytes: int

    def ready(self) -> None:
        """Have TEXT in the cache and nothing behind it. Not timed."""

    def burst(self, rows: int) -> None:
        """BURST passes of `rows` rows behind TEXT, with the logits of all."""

    def chain(self) -> None:
        """CHAIN passes of one row, each for the best guess of the one before."""


@dataclass(frozen=True, slots=True)
class Spec:
    """name: of the rival; kind: `ours` for an exported directory through its drafter, `bare` for its graph alone,
    `llama.cpp` for a GGUF file; flash, repack: see `tools.bench.llama.Setting`.
    """

    name: str
    kind: Literal["ours", "bare", "llama.cpp"]
    path: Path
    flash: bool = False
    repack: bool = False

    def make(self, threads: int) -> Rival:
        match self.kind:
            case "ours":
                return Ours(self.path, threads)
            case "bare":
                return Bare(self.path, threads)
            case _:
                from tools.bench.llama import Llama, Setting, load

                model = load(self.path, repack=self.repack)
                return Llama(self.path, model, threads, Setting(self.flash, self.repack))


class Ours:
    """A drafter as a board uses it."""

    def __init__(self, directory: Path, threads: int) -> None:
        facts = manifest.read(directory, "drafter")
        self.drafter: CachedDrafter = runtimes.load(directory, threads=threads)
        self.about: dict[str, object] = {
            "model": facts.name,
            "runtime": facts.runtime,
            "provider": self.drafter.info.provider,
            "compute": facts.compute,
            "quantisation": facts.quantisation,
        }
        self.read_bytes = reads.of_export(directory, CONTEXT)

    def ready(self) -> None:
        self.row = self.drafter.prefill(TEXT)

    def burst(self, rows: int) -> None:
        chain: list[tuple[int, Row | int]] = [(7, self.row), *((7 + i, i - 1) for i in range(1, rows))]
        for _ in range(BURST):
            self.drafter.extend(chain)

    def chain(self) -> None:
        row = self.row
        for _ in range(CHAIN):
            (best,) = self.drafter.candidates(row, GREEDY, 1)
            (row,) = self.drafter.extend([(best.id, row)])

    def choose(self, sampling: Sampling) -> list[Candidate]:
        """Three guesses behind TEXT."""
        return self.drafter.candidates(self.row, sampling, 3)


class Bare:
    """ONNX Runtime alone on the drafter's graph: a session and bindings made once, the same calls again and again."""

    def __init__(self, directory: Path, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = str(directory / "model.onnx")
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._logits: dict[int, np.ndarray] = {}
        self._held: list[np.ndarray] = []
        self._bindings = {rows: self._bound(rows) for rows in ROWS}
        self.about: dict[str, object] = {
            "model": manifest.read(directory, "drafter").name,
            "runtime": f"onnxruntime {ort.__version__}",
        }
        self.read_bytes = reads.of_export(directory, CONTEXT)

    def ready(self) -> None:
        """The cache holds zeros: no value changes what is computed."""

    def burst(self, rows: int) -> None:
        for _ in range(BURST):
            self._session.run_with_iobinding(self._bindings[rows])

    def chain(self) -> None:
        for _ in range(CHAIN):
            self._session.run_with_iobinding(self._bindings[1])
            self._logits[1].argmax()

    def _bound(self, rows: int):
        binding = self._session.io_binding()
        total = CONTEXT + rows
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.arange(5, 5 + rows, dtype=np.int64)[None],
            "position_ids": np.arange(CONTEXT, total, dtype=np.int64)[None],
            "attention_bias": np.zeros((1, 1, rows, total), np.float32),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_length": np.array(total, np.int32),
            "logit_rows": np.arange(rows, dtype=np.int64),
        }
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._held += feeds.values()
        for value in self._session.get_inputs():
            if value.name.startswith("past."):
                cache = np.zeros((1, value.shape[1], 4 * CONTEXT, value.shape[3]), np.float32)
                self._held.append(cache)
                binding.bind_input(value.name, "cpu", 0, np.float32, cache.shape, cache.ctypes.data)
                present = value.name.replace("past.", "present.")
                binding.bind_output(present, "cpu", 0, np.float32, cache.shape, cache.ctypes.data)
        logits = self._logits[rows] = np.empty((rows, self._session.get_outputs()[0].shape[1]), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return binding
