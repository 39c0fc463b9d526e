"""Which runtime computes a drafter. Each is imported when it is wanted, so that a board has only its own in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge.drafters import manifest
from edge.drafters.accelerator import Accelerator
from edge.drafters.cached import CachedDrafter
from protocol.errors import ConfigError, ModelError

# What computes an export on a processor where its own runtime needs a GPU: TensorRT's is standard ONNX.
ON_CPU = {"tensorrt": "onnx"}


def load(
    directory: str | Path,
    kind: str = "auto",
    *,
    threads: int = 1,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    context: int | None = None,
    verify: bool = False,
    huge_pages: bool = True,
    accelerator: Accelerator | None = None,
) -> CachedDrafter:
    """The drafter in a directory that `python -m tools.export drafter` wrote.

    kind: the runtime, `auto` for the one that it was exported for; providers: of ONNX Runtime; context: tokens that
    the cache holds, at most the model's own; by default 4096 or what the model takes; verify: check the weights against
    the manifest's digest; huge_pages: whether `native` may copy the weights into such; accelerator: for what works on a
    GPU. An export for one may be run without, see `ON_CPU`.
    Raises ModelError for a directory that cannot be used, ConfigError for another runtime's.
    """
    made_for = manifest.read(Path(directory), "drafter").runtime
    if kind not in ("auto", made_for) and kind != ON_CPU.get(made_for):
        raise ConfigError(
            f"the drafter is for the runtime {made_for!r}, not {kind!r}",
            where=str(directory),
            remedy=f'set `kind = "{made_for}"` in [drafter], or export the model for {kind}: docs/export.md',
        )
    match kind if kind != "auto" else made_for:
        case "suffix":
            raise ModelError(
                "holds a tokenizer and no model",
                where=str(directory),
                remedy="export one: python -m tools.export drafter",
            )
        case "native":
            from edge.drafters.native import NativeDrafter

            return NativeDrafter.load(directory, threads, context, verify=verify, huge_pages=huge_pages)
        case "litert":
            from edge.drafters.litert import LitertDrafter

            return LitertDrafter.load(directory, threads, context, verify=verify)
        case "tensorrt":
            from edge.drafters.tensorrt import TensorRtDrafter

            return TensorRtDrafter.load(directory, accelerator or Accelerator(), context, verify=verify)
        case _:
            from edge.drafters.onnx import OnnxDrafter

            return OnnxDrafter.load(directory, threads, providers, context, verify=verify, accelerator=accelerator)
