"""The TensorRT drafter: an engine built on this board from the Q/DQ graph, its cache on the GPU."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.drafters import engine_cache, manifest, shortlist
from edge.drafters.accelerator import Accelerator
from edge.drafters.cached import DEFAULT_CONTEXT, CachedDrafter
from edge.drafters.cuda import TO_DEVICE, TO_HOST, DeviceCache, Memory, Pinned, Stream, aligned, compute_capability
from edge.drafters.engine_build import build, check_disk, import_tensorrt, new_logger
from edge.drafters.qdq import INPUTS, MOST_ROWS, PROFILES, Half, Int32, QdqForward, Shape, padded
from protocol.errors import ModelError

log = logging.getLogger(__name__)


class TensorRtDrafter(CachedDrafter):
    """A `Drafter` for a directory that `python -m tools.export drafter --runtime tensorrt` wrote."""

    @classmethod
    def load(
        cls,
        directory: str | Path,
        accelerator: Accelerator,
        context: int | None = None,
        *,
        verify: bool = False,
    ) -> TensorRtDrafter:
        """Load a model directory: its engine from `accelerator.engines`, or built there first, which takes minutes.

        context: tokens that the cache holds, at most the model's own; by default 4096 or what the model takes.
        verify: check the weights against the manifest's digest.
        Raises ModelError for a directory that cannot be used, without TensorRT or a GPU, and where it cannot be built.
        """
        directory = Path(directory)
        facts = manifest.read(directory, "drafter", verify=verify)
        trt = import_tensorrt()
        capacity = min(context or DEFAULT_CONTEXT, facts.context)
        stream = Stream(accelerator.device)
        key = key_of(trt, accelerator, facts, capacity)
        engine = _engine(trt, directory / facts.weights_files[0], key, accelerator)
        forward = QdqForward(EnginePasses(trt, engine, stream, capacity, key), capacity)
        return cls(forward, facts, shortlist.read(directory, facts))


def outlook(directory: Path, accelerator: Accelerator, context: int | None) -> tuple[str, bool]:
    """What will happen at the next load, in words, and whether an engine is there for it. Raises as `load` would."""
    facts = manifest.read(directory, "drafter")
    trt = import_tensorrt()
    key = key_of(trt, accelerator, facts, min(context or DEFAULT_CONTEXT, facts.context))
    said = f"TensorRT {key.tensorrt}, SM {key.sm}, Jetson Linux {key.platform or '(none)'}"
    if engine_cache.read(accelerator.engines, key) is not None:
        return f"{said}: {key.path(accelerator.engines)}", True
    free = check_disk(accelerator.engines, directory / facts.weights_files[0])
    return f"{said}: none is kept in {accelerator.engines} yet, {free >> 20} MiB are free there", False


def key_of(trt: ModuleType, accelerator: Accelerator, facts: manifest.Manifest, capacity: int) -> engine_cache.Key:
    """What an engine for this board and this drafter is kept as. Raises ModelError where there is no GPU."""
    return engine_cache.Key(
        platform=engine_cache.platform(),
        tensorrt=str(trt.__version__),
        sm=compute_capability(accelerator.device),
        weights=facts.weights_digest,
        slots=padded(capacity),
    )


def _engine(trt: ModuleType, graph: Path, key: engine_cache.Key, accelerator: Accelerator) -> Any:
    """The engine that is kept for this key; where there is none, or TensorRT does not take it, a new one."""
    runtime = trt.Runtime(new_logger(trt))
    plan = engine_cache.read(accelerator.engines, key)
    if plan is not None:
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is not None:
            return engine
        log.warning("TensorRT does not take %s: it is built again", key.path(accelerator.engines))
    check_disk(accelerator.engines, graph)
    log.info("building an engine for %s, once; this takes minutes", graph.parent)
    began = time.monotonic()
    made = build(trt, graph, key.slots, accelerator.told)
    log.info("built in %.0f s", time.monotonic() - began)
    try:
        engine_cache.write(accelerator.engines, key, made)
    except OSError as error:
        log.warning("the engine cannot be kept, and is built again at the next start: %s", error)
    engine = runtime.deserialize_cuda_engine(made)
    if engine is None:
        raise ModelError("TensorRT does not take the engine that it built", where=str(graph), remedy="look at the log")
    return engine


class EnginePasses:
    """`Passes` of an engine: a context for each profile, and buffers on the GPU that are bound once."""

    def __init__(self, trt: ModuleType, engine: Any, stream: Stream, capacity: int, key: engine_cache.Key) -> None:
        self.provider = f"TensorRT {key.tensorrt}, SM {key.sm}"
        self.shape = shape_of(engine)
        self.cache = DeviceCache(self.shape, capacity, stream)
        self._engine, self._stream = engine, stream
        slots = padded(capacity)
        sizes = {
            "ids": MOST_ROWS * 4,
            "positions": MOST_ROWS * 4,
            "wanted": MOST_ROWS * 4,
            "bias": MOST_ROWS * (slots + MOST_ROWS) * 2,
        }
        self._buffers = {name: Memory(aligned(size)) for name, size in sizes.items()}
        self._device_logits = Memory(MOST_ROWS * self.shape.vocab * 4)
        self._logits = Pinned((MOST_ROWS, self.shape.vocab))
        self._contexts = [self._context(number) for number in range(len(PROFILES))]
        self._pasts = [0] * len(PROFILES)

    def _context(self, profile: int) -> Any:
        context = self._engine.create_execution_context()
        if context is None:
            raise ModelError(
                "TensorRT has no memory for the passes of its engine",
                where=self.provider,
                remedy="Stop what else has the GPU, or lower `context` of [drafter]",
            )
        context.set_optimization_profile_async(profile, self._stream.handle)
        self._stream.wait()
        addresses = {name: buffer.address for name, buffer in self._buffers.items()}
        addresses |= {name: self.cache.plane(number) for number, name in enumerate(self.shape.pasts())}
        addresses |= {"logits": self._device_logits.address, "new": self.cache.latest}
        for name, address in addresses.items():
            self._said(context.set_tensor_address(name, address), f"the address of {name}")
        return context

    def run(self, ids: Int32, positions: Int32, bias: Half, wanted: Int32, past: int) -> NDArray[np.float32]:
        """See `Passes.run`."""
        self._stream.use()
        number = next(i for i, profile in enumerate(PROFILES) if len(ids) <= profile.most)
        context = self._contexts[number]
        if past != self._pasts[number]:
            for name in self.shape.pasts():
                shape = (past, self.shape.kv_heads, self.shape.head_dim)
                self._said(context.set_input_shape(name, shape), f"a past of {past}")
            self._pasts[number] = past
        feeds: tuple[np.ndarray, ...] = (ids, positions, bias, wanted)
        for name, array in zip(INPUTS, feeds, strict=True):
            self._said(context.set_input_shape(name, array.shape), f"{name} of {array.shape}")
            self._stream.copy(self._buffers[name].address, array.ctypes.data, array.nbytes, TO_DEVICE)
        self._said(context.execute_async_v3(self._stream.handle), "a pass")
        logits = self._logits.array[: len(wanted)]
        self._stream.copy(logits.ctypes.data, self._device_logits.address, logits.nbytes, TO_HOST)
        self._stream.wait()
        return logits

    def _said(self, done: bool, what: str) -> None:
        if not done:
            raise ModelError(
                f"TensorRT refused {what}", where=self.provider, remedy="look at the log; remove the engine"
            )


def shape_of(engine: Any) -> Shape:
    """Raises KeyError for an engine that is none of ours."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    shapes = {name: tuple(engine.get_tensor_shape(name)) for name in names}
    _, kv_heads, head_dim = shapes["past.0.key"]
    layers = sum(name.startswith("past.") and name.endswith(".key") for name in names)
    return Shape(layers, kv_heads, head_dim, shapes["logits"][1])
