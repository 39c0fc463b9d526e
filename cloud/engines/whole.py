"""Models by transformers' own forward: any causal LM that calls the attention interface. It takes seconds to import."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from cloud.engines.ragged import Layout, attend

ATTENTION = "outrider_ragged"

AttentionInterface.register(ATTENTION, attend)


class Whole(nn.Module):
    """As `Decoder` takes and gives."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, layout: Layout) -> torch.Tensor:
        """ids, positions: [rows]; kept: [n] rows. Returns their logits [n, vocab]."""
        return self.model(
            input_ids=ids[None], position_ids=positions[None], logits_to_keep=kept, use_cache=False, layout=layout
        ).logits[0]


def load_whole(directory: Path, dtype: torch.dtype) -> tuple[Whole, PretrainedConfig]:
    """Raises what transformers raises for a model that it cannot load."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # a bar is for a person, not for a log
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
    ).eval()
    return Whole(model), model.config.get_text_config()
