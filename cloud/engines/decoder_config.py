"""What config.json says of a decoder like llama's, where it says nothing that `cloud.engines.decoder` does not do."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Literal

import msgspec
import torch

log = logging.getLogger(__name__)

# Said of training, of texts or to other software, and nothing of the pass.
BESIDE = frozenset(
    (
        "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
        "initializer_range", "max_position_embeddings", "max_window_layers", "pad_token_id", "torch_dtype",
        "transformers_version", "use_cache",
    )
)  # fmt: skip


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rotary positions (Su et al., 2104.09864), and how Llama 3.1 stretches the slow ones to a longer context."""

    rope_theta: float
    rope_type: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def frequencies(self, width: int) -> torch.Tensor:
        """[width / 2] radians a position, of a head of `width`."""
        plain = 1.0 / (self.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        if self.rope_type == "default":
            return plain
        # Turns within the original context: many are kept, few are stretched, between both a blend.
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = blend.clamp(0.0, 1.0)
        return (1 - kept) * plain / self.factor + kept * plain


class DecoderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The names are those of transformers 5. Raises ValueError for a window."""

    model_type: Literal["llama", "qwen2"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: Rope
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: Literal[1] = 1
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: tuple[Literal["full_attention"], ...] = ()

    def __post_init__(self) -> None:
        if self.use_sliding_window:
            raise ValueError("attention with a sliding window")

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read(directory: Path) -> DecoderConfig | None:
    """None where there is no config.json, or one of another model, or of one with anything that is not known."""
    path = directory / "config.json"
    try:
        said = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        return msgspec.convert({name: value for name, value in said.items() if name not in BESIDE}, DecoderConfig)
    except (OSError, msgspec.MsgspecError) as error:
        log.info("%s: %s; it runs by transformers' own forward", path, error)
        return None
