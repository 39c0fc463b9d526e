"""A causal LM as one function: the rows of many sessions in, the logits of some of them out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cloud.engines import elementwise
from cloud.engines.decoder import load_decoder
from cloud.engines.decoder_config import read as read_config
from cloud.engines.few_rows import rows_at_once
from cloud.engines.huge_pages import Arena
from cloud.engines.kv import KvShape, Slab
from cloud.engines.numerics import DTYPES, Numerics
from cloud.engines.product import PanelLinear, has_panels, panels_shape
from cloud.engines.ragged import AttentionShape, Span, lay_out
from cloud.engines.rows import PackedLinear, TiledActivation, TiledLinear, find_spans, replace_modules
from protocol.errors import ModelError, NumericsError

log = logging.getLogger(__name__)

ACTIVATION_PACKAGES = ("transformers.activations", "torch.nn.modules.activation")


class Forward:
    """The model with its attention over slabs, and with the numerics that were asked for."""

    def __init__(self, model: nn.Module, config: Any, numerics: Numerics, where: str) -> None:
        """model: takes and gives what `Decoder` does; config: as transformers names its parts."""
        self.model = model
        self.numerics = numerics
        self.where = where
        self.name: str = config.model_type
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.num_logits: int = config.vocab_size
        self.dtype = next(model.parameters()).dtype
        self.kv_shape = KvShape(config.num_hidden_layers, key_heads, head_dim, self.dtype)
        groups = heads // key_heads
        if numerics.exact:
            self.shape = AttentionShape(groups, numerics.query_tile, numerics.key_multiple)
        else:
            self.shape = AttentionShape(groups, few=rows_at_once(self.dtype, groups, head_dim))

    def __call__(self, spans: Sequence[Span], ids: Sequence[int], kept: Sequence[int]) -> torch.Tensor:
        """ids: one a row, of all spans in order; kept: rows whose logits are wanted. Returns [kept, logits]."""
        positions = [position for span in spans for position in span.positions()]
        padding = [0] * (-len(ids) % self.numerics.row_tile if self.numerics.exact else 0)
        layout = lay_out(spans, self.shape, self.dtype, len(ids) + len(padding))
        with torch.inference_mode():
            return self.model(
                torch.tensor([*ids, *padding]),
                torch.tensor([*positions, *padding]),
                torch.tensor(kept, dtype=torch.int64),
                layout,
            )

    def draft_slots(self, rows: int) -> int:
        """Slots that a draft of so many rows may write; see `Span.spare`."""
        return 2 * rows if self.shape.exact else rows

    def new_slab(self, length: int, max_draft: int) -> Slab:
        """For a text of `length` tokens with a draft behind it, whose padded keys are read."""
        return Slab(self.kv_shape, length + self.draft_slots(max_draft) + self.shape.key_multiple - 1)

    def check(self, vocab_size: int) -> str:
        """Run a fixed probe through the model; returns a digest of its logits.

        Raises ModelError where the model does not do what this engine needs, NumericsError where exact numerics give
        a session other bits in company, in chunks or in a tree than alone.
        """
        probe = [(i * 7919 + 13) % vocab_size for i in range(self.numerics.key_multiple + 12)]
        head, tail = probe[:-4], probe[-4:]

        def run(chunks: Sequence[int], company: int, parents: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
            """The logits of the head's last row and of the draft."""
            slab, past, logits = self.new_slab(len(probe), 2 * len(draft)), 0, torch.empty(0)
            for i, chunk in enumerate(chunks):
                last = i == len(chunks) - 1
                ids = probe[:company]
                spans = [Span(self.new_slab(len(ids), 0), 0, 0, company, ())] if company else []
                spans.append(Span(slab, company, past, chunk, parents if last else ()))
                ids = [*ids, *head[past : past + chunk], *(draft if last else ())]
                logits = self(spans, ids, range(company + chunk - 1, len(ids)))
                past += chunk
            return logits

        try:
            alone = run([len(head)], 0, range(-1, 3), tail)  # [5, logits]
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise ModelError(
                f"{self.name} does not run through the attention interface: {error}",
                where=self.where,
                remedy="Use a model family that does, such as llama or qwen2",
            ) from error
        if not bool(alone.isfinite().all()):
            raise ModelError("its logits are not finite", where=self.where, remedy="The weights are damaged")
        if not self.numerics.exact:
            return ""
        chunked = run([5, 1, len(head) - 7, 1], 3, range(-1, 3), tail)
        other = (tail[0] + 1) % vocab_size
        tree = run([len(head) - 1, 1], 21, (-1, -1, 0, 1, 2, 3, 5), [other, tail[0], other, tail[1], other, *tail[2:]])
        # The tree holds the chain `tail` as draft rows 1, 3, 5, 6 beside a branch of other ids.
        in_tree = tree[[0, 2, 4, 6, 7]]
        for how, found in (("in chunks and company", chunked), ("in a tree", in_tree)):
            if not torch.equal(found, alone):
                worst = float((found.float() - alone.float()).abs().max())
                raise NumericsError(
                    f"logits {how} differ from those alone by up to {worst:.1e}",
                    where=self.where,
                    remedy='Set numerics.mode to "fast" for this model on this machine',
                )
        return hashlib.sha256(alone.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]

    def end_slot(self, span: Span) -> int:
        """The slot behind the last one that the pass writes for a span."""
        return span.past + span.chunk + (len(span.parents) if span.is_chain else self.draft_slots(len(span.parents)))

    def draft_slot(self, span: Span, i: int) -> int:
        """The slot in which draft row `i` of a span was left by the pass."""
        if self.shape.exact and not span.is_chain:
            return span.spare + i
        return span.past + span.chunk + i


def load_model(directory: Path, dtype: str, numerics: Numerics) -> Forward:
    """Load the model in `directory` for `numerics`. Raises ModelError for a model that cannot be read."""
    try:
        model, config = _decoder(directory, DTYPES[dtype], numerics) or _whole(directory, DTYPES[dtype])
    except Exception as error:
        raise ModelError(
            f"the model cannot be loaded: {error!r}",
            where=str(directory),
            remedy="Export the target again with `python -m tools.export target`",
        ) from error
    prepare(model, numerics)
    return Forward(model, config, numerics, str(directory))


def _decoder(directory: Path, dtype: torch.dtype, numerics: Numerics) -> tuple[nn.Module, Any] | None:
    """The shorter pass, where nothing in the model's files is unknown to it."""
    config = read_config(directory)
    if config is None:
        return None
    model, unused = load_decoder(directory, config, dtype, elementwise.quickest(dtype, numerics.exact))
    if unused:
        log.warning("%s runs by transformers' own forward: nobody knows what %s is for", directory, unused[0])
        return None
    return model, config


def _whole(directory: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from cloud.engines.whole import load_whole  # it imports transformers, which takes seconds

    return load_whole(directory, dtype)


def prepare(model: nn.Module, numerics: Numerics) -> None:
    """Give the model its kernels. Weights leave the file's memory map, which slows every pass down."""
    tile = numerics.row_tile
    in_panels = {m for m in model.modules() if type(m) is nn.Linear and has_panels(m.weight.dtype)}
    arena = Arena(sum(Arena.room(panels_shape(layer), layer.weight.dtype) for layer in in_panels))

    def kernel(module: nn.Module) -> nn.Module | None:
        if module in in_panels:
            return PanelLinear(module, arena)
        if type(module) is nn.Linear:
            return TiledLinear(module, tile) if numerics.exact else PackedLinear(module, tile)
        if numerics.exact and type(module).__module__ in ACTIVATION_PACKAGES:
            return TiledActivation(module)
        return None

    with torch.inference_mode():
        made = replace_modules(model, kernel)
        in_arena = {id(module.weight) for module in made if isinstance(module, PanelLinear)}
        for parameter in model.parameters():
            if id(parameter) not in in_arena:
                parameter.data = parameter.data.clone()
        find_spans([module for module in made if isinstance(module, TiledLinear)])
