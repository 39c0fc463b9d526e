"""The Q/DQ graph in ONNX Runtime: on the CPU the twin of what TensorRT computes, on a GPU through its provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge.drafters.qdq import INPUTS, MOST_ROWS, Cache, Half, Int32, Shape


def shape_of(session: ort.InferenceSession) -> Shape:
    """Raises KeyError for a graph that is none of ours."""
    inputs = {value.name: value.shape for value in session.get_inputs()}
    outputs = {value.name: value.shape for value in session.get_outputs()}
    _, kv_heads, head_dim = inputs["past.0.key"]
    layers = sum(name.startswith("past.") and name.endswith(".key") for name in inputs)
    return Shape(layers, kv_heads, head_dim, outputs["logits"][1])


class SessionPasses:
    """`Passes` of a session, the cache bound by address wherever it lies. device: the GPU's number, if it is on one."""

    def __init__(self, session: ort.InferenceSession, cache: Cache, provider: str, device: int = 0) -> None:
        self.shape, self.cache, self.provider = shape_of(session), cache, provider
        self._session, self._device = session, device
        self._binding = session.io_binding()
        self._logits = np.empty((0, self.shape.vocab), np.float32)
        self._past = 0
        self._rows = 0

    def run(self, ids: Int32, positions: Int32, bias: Half, wanted: Int32, past: int) -> NDArray[np.float32]:
        """See `Passes.run`."""
        if past != self._past:
            self._past = past
            for number, name in enumerate(self.shape.pasts()):
                shape = (past, self.shape.kv_heads, self.shape.head_dim)
                self._bind_cache(self._binding.bind_input, name, shape, self.cache.plane(number))
        if len(ids) != self._rows:
            self._rows = len(ids)
            shape = (self.shape.planes, len(ids), self.shape.row)
            self._bind_cache(self._binding.bind_output, "new", shape, self.cache.latest)
        if len(wanted) > len(self._logits):
            self._logits = np.empty((min(2 * len(wanted), MOST_ROWS), self.shape.vocab), np.float32)
        logits = self._logits[: len(wanted)]
        feeds: tuple[np.ndarray, ...] = (ids, positions, bias, wanted)
        for name, array in zip(INPUTS, feeds, strict=True):
            self._bind_host(self._binding.bind_input, name, array)
        self._bind_host(self._binding.bind_output, "logits", logits)
        self.cache.settle()
        self._session.run_with_iobinding(self._binding)
        return logits

    def _bind_host(self, bind: Any, name: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _bind_cache(self, bind: Any, name: str, shape: tuple[int, ...], address: int) -> None:
        bind(name, self.cache.device, self._device, np.float16, shape, address)
