"""From a configuration to what a board needs: its drafter and its text."""

from __future__ import annotations

import os

from edge.config import EdgeConfig
from edge.drafters import manifest
from edge.drafters.onnx import OnnxDrafter
from edge.text import Text


def load_drafter(config: EdgeConfig) -> OnnxDrafter:
    """Raises ModelError for a directory that cannot be used."""
    drafter = config.drafter
    return OnnxDrafter.load(
        drafter.model,
        threads=drafter.threads or os.cpu_count() or 1,
        providers=drafter.providers,
        context=drafter.context,
        verify=drafter.verify_weights,
    )


def load_text(config: EdgeConfig) -> Text:
    """Raises ModelError for a directory that cannot be used."""
    return Text.load(config.drafter.model, manifest.read(config.drafter.model, "drafter"))
