"""What the drafter costs beyond bare ONNX Runtime on the same graph, and what choosing its guesses costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from edge.drafters.onnx import OnnxDrafter
from protocol.sampling import Sampling
from tools.bench.record import ms, round_robin

CONTEXT = 128
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)
GREEDY = Sampling()


def bare_pass(directory: Path, *, rows: int, threads: int) -> Callable[[], object]:
    """ONNX Runtime alone: a session and a binding made once, `rows` rows behind CONTEXT tokens, the same call again
    and again.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    total = CONTEXT + rows
    feeds: dict[str, np.ndarray] = {
        "input_ids": np.arange(5, 5 + rows, dtype=np.int64)[None],
        "position_ids": np.arange(CONTEXT, total, dtype=np.int64)[None],
        "attention_bias": np.zeros((1, 1, rows, total), np.float32),
        "seqlens_k": np.array([total - 1], np.int32),
        "total_length": np.array(total, np.int32),
        "logit_rows": np.arange(rows, dtype=np.int64),
    }
    shapes = {value.name: value.shape for value in session.get_inputs()}
    held: list[np.ndarray] = list(feeds.values())
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, shape in shapes.items():
        if name.startswith("past."):
            cache = np.zeros((1, shape[1], 4 * CONTEXT, shape[3]), np.float32)
            held.append(cache)
            binding.bind_input(name, "cpu", 0, np.float32, cache.shape, cache.ctypes.data)
            present = name.replace("past.", "present.")
            binding.bind_output(present, "cpu", 0, np.float32, cache.shape, cache.ctypes.data)
    logits = np.empty((rows, session.get_outputs()[0].shape[1]), np.float32)
    binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
    held.append(logits)

    def run() -> object:
        session.run_with_iobinding(binding)
        return held

    return run


def our_pass(drafter: OnnxDrafter, *, rows: int) -> Callable[[], object]:
    """`extend` by a chain of `rows` behind the same text; each call adds a branch, so the cache grows a little."""
    root = drafter.prefill(range(5, 5 + CONTEXT))
    chain: list = [(7, root), *((7 + i, i - 1) for i in range(1, rows))]
    return lambda: drafter.extend(chain)


def choosing(drafter: OnnxDrafter, sampling: Sampling) -> Callable[[], object]:
    """The guesses behind one row, from logits of a real text."""
    row = drafter.prefill(range(5, 5 + CONTEXT))
    return lambda: drafter.candidates(row, sampling, 3)


def measure(directory: Path, *, threads: int, rounds: int) -> dict[str, object]:
    """Ratios against the bars: our pass over bare ONNX Runtime (1.10), choosing over the pass (0.15)."""

    def load() -> OnnxDrafter:
        return OnnxDrafter.load(directory, threads=threads)

    rivals: dict[str, Callable[[], object]] = {}
    for rows in (1, 2, 4):
        rivals[f"bare {rows}"] = bare_pass(directory, rows=rows, threads=threads)
        rivals[f"pass {rows}"] = our_pass(load(), rows=rows)
    rivals["choose T=0"] = choosing(load(), GREEDY)
    rivals["choose T=0.8 top-p 0.95"] = choosing(load(), SAMPLED)
    times = round_robin(rivals, rounds=rounds)
    info = load().info
    ratios = {f"pass over bare {rows} rows": times[f"pass {rows}"] / times[f"bare {rows}"] for rows in (1, 2, 4)}
    ratios["choosing over pass, T=0.8 top-p 0.95"] = times["choose T=0.8 top-p 0.95"] / times["pass 1"]
    return {
        "model": info.name,
        "compute": info.compute,
        "provider": info.provider,
        "threads": threads,
        "prompt_tokens": CONTEXT,
        "rounds": rounds,
        "ms": {name: ms(taken) for name, taken in times.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }
