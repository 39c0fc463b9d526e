"""From a configuration to what a board needs: its drafter and its text."""

from __future__ import annotations

import logging
from pathlib import Path

from edge.building import Building
from edge.config import EdgeConfig
from edge.cores import pin
from edge.drafters import manifest, runtimes
from edge.drafters.accelerator import Accelerator
from edge.drafters.base import Drafter
from edge.drafters.cached import CachedDrafter
from edge.drafters.mixed import MixedDrafter
from edge.drafters.suffix import SuffixDrafter
from edge.text import Text
from protocol.errors import ModelError

log = logging.getLogger(__name__)


def load_drafter(config: EdgeConfig) -> Drafter:
    """What guesses on this board: the model, and what was written before unless that is turned off.

    Raises as `load_model` does.
    """
    model = load_model(config)
    return MixedDrafter(model) if config.drafter.suffix and isinstance(model, CachedDrafter) else model


def load_model(config: EdgeConfig, *, beside_service: bool = False) -> CachedDrafter | SuffixDrafter:
    """The drafter alone, on the board's cores, where this thread and all that it starts stay from now on.

    beside_service: the board's service may be running, and the weights are in memory already: no copy of them is made.

    With `kind = "suffix"`, or a directory that holds a tokenizer and no model, it guesses what was written before.
    Where TensorRT builds an engine for it first, that takes minutes, and is told of.
    Raises ModelError for a directory that cannot be used, ConfigError for a core that is not there.
    """
    drafter = config.drafter
    cores = pin(config.board)
    if drafter.kind == "suffix" or manifest.read(drafter.model, "drafter").runtime == "suffix":
        return SuffixDrafter.load(drafter.model, drafter.context)
    with Building() as building:
        loaded = runtimes.load(
            drafter.model,
            drafter.kind,
            threads=drafter.threads or cores,
            providers=drafter.providers,
            context=drafter.context,
            verify=drafter.verify_weights,
            huge_pages=drafter.huge_pages and not beside_service,
            accelerator=Accelerator(drafter.device, engines(config), drafter.fp16, building.told),
        )
    log.info("drafting with %s, %s on %s", loaded.info.name, loaded.info.compute, loaded.info.provider)
    return loaded


def runtime(config: EdgeConfig) -> str:
    """What will compute the drafter; "" where its directory cannot be read."""
    if config.drafter.kind != "auto":
        return config.drafter.kind
    try:
        return manifest.read(config.drafter.model, "drafter").runtime
    except ModelError:
        return ""


def engines(config: EdgeConfig) -> Path:
    """Where the board keeps what TensorRT builds."""
    return config.drafter.engines or config.device.state / "engines"


def load_text(config: EdgeConfig) -> Text:
    """Raises ModelError for a directory that cannot be used."""
    return Text.load(config.drafter.model, manifest.read(config.drafter.model, "drafter"))
