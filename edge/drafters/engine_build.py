"""Building a TensorRT engine on the board that will run it: minutes, once, with its progress told."""

from __future__ import annotations

import logging
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from edge.drafters.qdq import PROFILES
from protocol.errors import ModelError

log = logging.getLogger(__name__)

REASONS = 2  # of a parser's, which complains of each node that is like the first
ROOM = 3  # times the weights: the plan, and as much again while it is written beside its predecessor
SYSTEM_PACKAGES = "usr/lib/python3*/dist-packages/tensorrt"

Told = Callable[[str, float], None]  # (what is being done, share of all that is done)


def import_tensorrt(root: Path = Path("/")) -> ModuleType:
    """The system's TensorRT. Raises ModelError, saying what is missing, where it cannot be imported."""
    try:
        import tensorrt
    except ImportError as error:
        raise _absent(root, error) from error
    if not hasattr(tensorrt, "Builder"):  # a directory of that name, or one of the empty packages that are called so
        raise _absent(root, ImportError("what is imported as tensorrt has no Builder"))
    return tensorrt


def _absent(root: Path, error: ImportError) -> ModelError:
    installed = sorted(root.glob(SYSTEM_PACKAGES))
    python = f"Python {sysconfig.get_python_version()}"
    if not installed:
        remedy = "On a Jetson: sudo apt install python3-libnvinfer; elsewhere: pip install tensorrt"
    elif sys.prefix != sys.base_prefix:
        remedy = (
            f"{installed[0]} is the system's, which this environment does not see: make it anew with"
            " `/usr/bin/python3 -m venv --system-site-packages`, and install Outrider there"
        )
    else:
        remedy = f"{installed[0]} is for the system's own Python, and this is {python}: run with /usr/bin/python3"
    return ModelError(f"TensorRT cannot be imported by {python}: {error}", where=sys.prefix, remedy=remedy)


def build(trt: ModuleType, graph: Path, slots: int, told: Told) -> Any:
    """The plan of an engine for an exported graph: a buffer. slots: of the longest past.

    Raises ModelError for a graph that this TensorRT does not take, and where it cannot build.
    """
    logger = new_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        reasons = "; ".join(str(parser.get_error(i)).strip() for i in range(min(parser.num_errors, REASONS)))
        raise ModelError(
            f"TensorRT {trt.__version__} does not take it: {reasons}",
            where=str(graph),
            remedy="export it again with --runtime tensorrt; it is meant for TensorRT 10.3 (JetPack 6.1) or later",
        )
    config = builder.create_builder_config()
    config.progress_monitor = monitor = _monitor(trt, told)
    for rows in PROFILES:
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            profile.set_shape(tensor.name, *rows.shapes(tensor.name, tuple(tensor.shape), slots))
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ModelError(
            f"TensorRT {trt.__version__} could not build an engine: {logger.last or 'it does not say why'}",
            where=str(graph),
            remedy="Stop what else takes memory and try again; a smaller `context` of [drafter] needs less",
        )
    monitor.phases.told("done", 1.0)
    return plan


def check_disk(directory: Path, graph: Path) -> int:
    """Bytes that are free there. Raises ModelError where an engine of this graph would not fit."""
    place = next(parent for parent in (directory, *directory.parents) if parent.exists())
    need, free = ROOM * _size(graph), shutil.disk_usage(place).free
    if free < need:
        raise ModelError(
            f"{free >> 20} MiB are free, an engine may take {need >> 20}",
            where=str(directory),
            remedy="Make room, or name another place as `engines` of [drafter]",
        )
    return free


def _size(graph: Path) -> int:
    return sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))


class Phases:
    """How far a build is, from the phases that TensorRT announces: they nest, and each counts its own steps."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self._open: dict[str, tuple[str | None, int, int]] = {}  # name -> (parent, steps in all, steps done)
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._open[name] = (parent, max(1, steps), 0)
        self._tell(name)

    def step(self, name: str, step: int) -> None:
        if name in self._open:
            parent, steps, _ = self._open[name]
            self._open[name] = (parent, steps, min(steps, step + 1))
            self._tell(name)

    def finish(self, name: str) -> None:
        self._open.pop(name, None)

    def _tell(self, name: str) -> None:
        """A phase that is open counts as part of its parent's next step. What was said is never taken back."""
        share, inner = 0.0, name
        for _ in self._open:  # a phase that named itself as its parent would have no end
            parent, steps, done = self._open[inner]
            share = min(1.0, (done + share) / steps)
            if parent is None or parent not in self._open:
                break
            inner = parent
        self._share = max(self._share, share)
        self.told(name, self._share)


def _monitor(trt: ModuleType, told: Told) -> Any:
    """TensorRT's own classes can be derived from only where it is there."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases = Phases(told)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.phases.finish(phase_name)

    return Monitor()


def new_logger(trt: ModuleType) -> Any:
    """TensorRT's messages, into the log; `last`: its latest error."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.DEBUG,  # of which it has many, on every tensor that it casts
        trt.ILogger.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity)
            if level is None:
                return
            if level == logging.ERROR:
                self.last = msg
            log.log(level, "TensorRT: %s", msg)

    return Logger()
