"""Where ONNX Runtime may compute: providers, what each is told, and the Q/DQ graph over whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from edge.drafters.accelerator import Accelerator
from edge.drafters.qdq import MOST_ROWS, Cache, HostCache, Profile, QdqForward, padded
from edge.drafters.qdq_onnx import SessionPasses, shape_of
from protocol.errors import ModelError

# Providers that work in the host's memory.
HOST_PROVIDERS = ("CPUExecutionProvider", "XnnpackExecutionProvider", "ACLExecutionProvider", "DnnlExecutionProvider")
CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
GPU_PROVIDERS = (CUDA, TENSORRT)

EVERY_PASS = Profile(1, MOST_ROWS)

Chosen = list[tuple[str, dict[str, str]]]


def check_providers(providers: Sequence[str], graph: Path) -> None:
    """Raises ModelError for a provider that this ONNX Runtime does not have, or that cannot be used here."""
    available = [name for name in ort.get_available_providers() if name in (*HOST_PROVIDERS, *GPU_PROVIDERS)]
    if unknown := [name for name in providers if name not in available]:
        remedy = f"choose from: {', '.join(available)}"
        if unknown[0] in GPU_PROVIDERS:
            remedy += "; for a GPU, install onnxruntime-gpu in place of onnxruntime (on a Jetson, NVIDIA's build of it)"
        raise ModelError(f"execution provider {unknown[0]!r} is not usable here", where=str(graph), remedy=remedy)


def with_options(providers: Sequence[str], accelerator: Accelerator, graph: Path, capacity: int | None) -> Chosen:
    """Each provider with what it is told. capacity: slots of a Q/DQ graph's cache, None for another graph."""
    options: dict[str, dict[str, str]] = {
        CUDA: {"device_id": str(accelerator.device)},
        TENSORRT: {
            "device_id": str(accelerator.device),
            "trt_fp16_enable": str(accelerator.fp16),
            "trt_engine_cache_enable": "True",
            "trt_engine_cache_path": str(accelerator.engines),
            **({} if capacity is None else _profile(graph, capacity)),
        },
    }
    return [(name, options.get(name, {})) for name in providers]


def _profile(graph: Path, capacity: int) -> dict[str, str]:
    """The shapes that TensorRT's provider builds one engine for; without them it builds anew whenever one is new."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")  # only its inputs are looked at
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    shapes: list[list[str]] = [[], [], []]
    for value in session.get_inputs():
        sizes = EVERY_PASS.shapes(value.name, tuple(value.shape), padded(capacity))
        for named, size in zip(shapes, sizes, strict=True):
            named.append(f"{value.name}:{'x'.join(map(str, size))}")
    return {f"trt_profile_{k}_shapes": ",".join(s) for k, s in zip(("min", "opt", "max"), shapes, strict=True)}


def qdq_forward(session: ort.InferenceSession, capacity: int, provider: str, accelerator: Accelerator) -> QdqForward:
    """A `Forward` over a Q/DQ graph, the cache where the provider works. Raises KeyError for another graph."""
    shape = shape_of(session)
    cache: Cache
    if provider in GPU_PROVIDERS:
        from edge.drafters.cuda import DeviceCache, Stream

        cache = DeviceCache(shape, capacity, Stream(accelerator.device))
    else:
        cache = HostCache(shape, capacity)
    return QdqForward(SessionPasses(session, cache, provider, accelerator.device), capacity)
