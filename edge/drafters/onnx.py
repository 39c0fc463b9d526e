"""The ONNX Runtime drafter: `tools/export/graph.py`'s graph, with the cache bound in place.

GroupQueryAttention on the CPU writes new rows into the cache it reads when past and present are bound to one address,
so a pass never copies the past. A row's attention bias hides what it must not see.

Providers of a GPU leave GroupQueryAttention in float32 to the CPU, so the cache stays in the host's memory with them
too, and ONNX Runtime copies what crosses. The Q/DQ graph (`edge.drafters.qdq`) runs on a GPU as a whole, and its cache
lies there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edge.drafters import manifest, shortlist
from edge.drafters.accelerator import Accelerator
from edge.drafters.cached import DEFAULT_CONTEXT, CachedDrafter, Forward, Seen
from edge.drafters.providers import check_providers, qdq_forward, with_options
from edge.memory import untouched
from protocol.errors import ModelError

HIDDEN = -1e9  # added to a score before softmax: its exponential is 0 in float32


class OnnxDrafter(CachedDrafter):
    """A `Drafter` for a directory that `python -m tools.export drafter` wrote for ONNX Runtime, or for TensorRT."""

    @classmethod
    def load(
        cls,
        directory: str | Path,
        threads: int = 1,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        context: int | None = None,
        *,
        verify: bool = False,
        spin: bool = False,
        accelerator: Accelerator | None = None,
    ) -> OnnxDrafter:
        """Load a model directory.

        context: tokens that the cache holds, at most the model's own; by default 4096 or what the model takes.
        verify: check the weights against the manifest's digest, which reads them once more.
        spin: let the threads wait for work by spinning: a little faster, but it burns the board's cores.
        accelerator: for providers that work on a GPU.
        Raises ModelError for a file that is missing, corrupt or not the manifest's, or a provider that is not there.
        """
        directory = Path(directory)
        facts = manifest.read(directory, "drafter", verify=verify)
        graph, capacity = directory / facts.weights_files[0], min(context or DEFAULT_CONTEXT, facts.context)
        check_providers(providers, graph)
        standard = facts.runtime == "tensorrt"
        chosen = with_options(providers, accelerator or Accelerator(), graph, capacity if standard else None)
        session = _session(graph, threads, chosen, spin)
        try:
            forward: Forward
            if standard:
                forward = qdq_forward(session, capacity, runs_on(session), accelerator or Accelerator())
            else:
                forward = OnnxForward(session, capacity)
            return cls(forward, facts, shortlist.read(directory, facts))
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"not a graph of this drafter: {error}",
                where=str(graph),
                remedy="export the model again",
            ) from error


class OnnxForward:
    """A `Forward`: the session with its buffers bound, the cache once, what changes with each pass by address."""

    def __init__(self, session: ort.InferenceSession, capacity: int) -> None:
        self.capacity, self.provider = capacity, runs_on(session)
        self._session = session
        self._binding = session.io_binding()
        shapes = {value.name: value.shape for value in session.get_inputs()}
        layers = sum(name.startswith("past.") and name.endswith(".key") for name in shapes)
        _, heads, _, width = shapes["past.0.key"]
        self._vocab = session.get_outputs()[0].shape[1]
        shape = (layers, 2, 1, heads, capacity, width)
        # Untouched pages cost no memory, so the capacity is paid for only as the text grows.
        self._cache = np.frombuffer(untouched(4 * prod(shape)), np.float32).reshape(shape)
        for layer in range(layers):
            for side, name in enumerate(("key", "value")):
                buffer = self._cache[layer, side]  # [1, kv_heads, capacity, head_dim]
                self._bind(self._binding.bind_input, f"past.{layer}.{name}", buffer)
                self._bind(self._binding.bind_output, f"present.{layer}.{name}", buffer)
        self._bias = np.empty(0, np.float32)
        self._logits = np.empty((0, self._vocab), np.float32)

    def run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> np.ndarray:
        """See `Forward.run`."""
        total = start + len(ids)
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self._vocab), np.float32)
        logits = self._logits[: len(wanted)]
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.array([ids], np.int64),
            "position_ids": np.array([positions], np.int64),
            "attention_bias": self._hidden(len(ids), total, tree),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_length": np.array(total, np.int32),
            "logit_rows": np.array(wanted, np.int64),
        }
        for name, array in feeds.items():
            self._bind(self._binding.bind_input, name, array)
        self._bind(self._binding.bind_output, "logits", logits)
        self._session.run_with_iobinding(self._binding)
        return logits

    def _hidden(self, rows: int, total: int, tree: Seen | None) -> np.ndarray:
        """The attention bias [1, 1, rows, total]. A plain text needs none: the kernel's own mask is causal."""
        if self._bias.size < rows * total:
            self._bias = np.empty(rows * total, np.float32)
        bias = self._bias[: rows * total].reshape(1, 1, rows, total)
        bias[:] = 0
        if tree is not None:
            bias[0, 0, :, total - tree.shape[1] :][~tree] = HIDDEN
        return bias

    def move(self, slots: Sequence[int], first: int) -> None:
        """See `Forward.move`; rows that already lie where they shall stay."""
        still = next((i for i, slot in enumerate(slots) if slot != first + i), len(slots))
        if old := list(slots[still:]):
            start = first + still
            self._cache[..., start : start + len(old), :] = self._cache[..., old, :]

    def _bind(self, bind: Callable[..., Any], name: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _session(
    path: Path, threads: int, providers: Sequence[tuple[str, dict[str, str]]], spin: bool
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # Weights of the Q/DQ graph are multiplied with activations as they are, and not, as by default, with rounded ones.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # ONNX Runtime's exceptions share no base below Exception
        reason = str(error).splitlines()[0]
        raise ModelError(f"cannot be loaded: {reason}", where=str(path), remedy="export the model again") from error


def runs_on(session: ort.InferenceSession) -> str:
    """The provider that most of the graph went to: one that was asked for first may have taken nothing of it."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # an older ONNX Runtime does not tell
        return session.get_providers()[0]
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[part.ep_name] += len(part.get_nodes())
    return nodes.most_common(1)[0][0]
