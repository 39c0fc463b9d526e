"""CUDA's memory and TensorRT's engines, played by the host's memory and by ONNX Runtime on the CPU.

No machine that runs these tests has to have a GPU, and what goes wrong between a board and its engine has to be played
anyway. What is checked here is what a GPU would not forgive: addresses outside an allocation or not aligned, shapes
outside the profile, copies that overlap.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edge.drafters import cuda, engine_build
from protocol.errors import ModelError

ALIGNMENT = 256
TYPES = {"tensor(int32)": np.int32, "tensor(float16)": np.float16, "tensor(float)": np.float32}


class PlayedGpu:
    """What `edge.drafters.cuda.call` is answered with."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
        monkeypatch.setattr(cuda, "call", self.call)
        freed = SimpleNamespace(cudaFree=lambda _: 0, cudaFreeHost=lambda _: 0)
        monkeypatch.setattr(cuda, "library", lambda: freed)
        return self

    def call(self, name: str, *arguments: Any) -> None:
        values = [argument._obj if hasattr(argument, "_obj") else argument.value for argument in arguments]
        getattr(self, name, lambda *_: None)(*values)

    def cudaMalloc(self, pointer: ctypes.c_void_p, size: int) -> None:
        block = np.full(size + ALIGNMENT, 0xA5, np.uint8)
        pointer.value = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.blocks[pointer.value] = block[pointer.value - block.ctypes.data :][:size]

    def cudaHostAlloc(self, pointer: ctypes.c_void_p, size: int, flags: int) -> None:
        self.cudaMalloc(pointer, size)

    def cudaMemset(self, pointer: int, value: int, size: int) -> None:
        self.bytes(pointer, size)[:] = value

    def cudaDeviceGetAttribute(self, value: ctypes.c_int, attribute: int, device: int) -> None:
        value.value = {cuda.MAJOR: 8, cuda.MINOR: 7}[attribute]

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: Any) -> None:
        here = to if kind == cuda.TO_DEVICE else source
        self.bytes(here, size)
        ctypes.memmove(to, source, size)

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, kind: int, stream: Any
    ) -> None:
        assert width <= min(to_pitch, pitch)
        for row in range(rows):
            a, b = to + row * to_pitch, source + row * pitch
            assert abs(a - b) >= width, "a copy that overlaps itself"
            self.bytes(a, width)[:] = self.bytes(b, width)

    def bytes(self, address: int, size: int) -> np.ndarray:
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start :][:size]
        raise AssertionError(f"{size} bytes at {address:#x} are not the GPU's")


class PlayedTensorRt:
    """A module `tensorrt`. builds: how many engines it has built; refuses: whether it takes an engine that was kept."""

    def __init__(self, gpu: PlayedGpu, version: str = "10.3.0") -> None:
        self.__version__, self.gpu = version, gpu
        self.builds = 0
        self.refuses = False
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        names = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")
        self.ILogger = type("ILogger", (), dict(zip(names, range(4), strict=True)))
        self.IProgressMonitor = type("IProgressMonitor", (), {})
        self.Builder = lambda logger: PlayedBuilder(self)
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse_from_file=network.parse, num_errors=0)
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=self.deserialize)

    def deserialize(self, plan: Any) -> PlayedEngine | None:
        kept = not isinstance(plan, bytes)
        if self.refuses and kept:
            return None
        version, graph = bytes(plan).decode().split("\n")
        assert version == self.__version__, "an engine of another TensorRT was taken for this one's"
        return PlayedEngine(self.gpu, graph)


class PlayedBuilder:
    def __init__(self, trt: PlayedTensorRt) -> None:
        self.trt = trt
        self.profiles: list[dict[str, tuple]] = []

    def create_network(self, flags: int) -> PlayedBuilder:
        assert flags == 1 << self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return self

    create_builder_config = lambda self: self  # noqa: E731

    def parse(self, path: str) -> bool:
        self.graph = path
        self.inputs = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
        self.num_inputs = len(self.inputs)
        return True

    def get_input(self, number: int) -> Any:
        value = self.inputs[number]
        return SimpleNamespace(name=value.name, shape=[-1 if isinstance(n, str) else n for n in value.shape])

    def create_optimization_profile(self) -> Any:
        self.profiles.append({})
        return SimpleNamespace(set_shape=lambda name, *shapes: self.profiles[-1].update({name: shapes}))

    def add_optimization_profile(self, profile: Any) -> None:
        assert set(self.profiles[-1]) == {value.name for value in self.inputs}

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        self.trt.builds += 1
        self.progress_monitor.phase_start("Building engine", None, 2)
        for step in range(2):
            assert self.progress_monitor.step_complete("Building engine", step)
        self.progress_monitor.phase_finish("Building engine")
        return f"{self.trt.__version__}\n{self.graph}".encode()


class PlayedEngine:
    def __init__(self, gpu: PlayedGpu, graph: str) -> None:
        self.gpu = gpu
        options = ort.SessionOptions()
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # as the drafter's twin has it
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.values = {value.name: value for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.num_io_tensors = len(self.values)

    def get_tensor_name(self, number: int) -> str:
        return list(self.values)[number]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(n, str) else n for n in self.values[name].shape]

    def create_execution_context(self) -> PlayedContext:
        return PlayedContext(self)


class PlayedContext:
    def __init__(self, engine: PlayedEngine) -> None:
        self.engine = engine
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> None:
        self.most = engine_build.PROFILES[profile].most

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % ALIGNMENT == 0 and name in self.engine.values

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        least, most = (64, 1 << 20) if name.startswith("past.") else (1, self.most)
        return least <= shape[0] <= most

    def execute_async_v3(self, stream: int) -> bool:
        session, gpu = self.engine.session, self.engine.gpu
        feeds = {}
        for value in session.get_inputs():
            shape, kind = self.shapes[value.name], np.dtype(TYPES[value.type])
            block = gpu.bytes(self.addresses[value.name], int(np.prod(shape)) * kind.itemsize)
            feeds[value.name] = block.view(kind).reshape(shape)
        for value, found in zip(session.get_outputs(), session.run(None, feeds), strict=True):
            gpu.bytes(self.addresses[value.name], found.nbytes)[:] = found.reshape(-1).view(np.uint8)
        return True


def install(monkeypatch: pytest.MonkeyPatch, version: str = "10.3.0") -> PlayedTensorRt:
    """A board with a GPU and TensorRT."""
    from edge.drafters import tensorrt

    trt = PlayedTensorRt(PlayedGpu().install(monkeypatch), version)
    monkeypatch.setattr(tensorrt, "import_tensorrt", lambda: trt)
    return trt


def without_gpu() -> str:
    """Why an engine cannot run here; "" where it can."""
    try:
        engine_build.import_tensorrt()
        cuda.compute_capability(0)
    except ModelError as error:
        return str(error)
    return ""
