"""One forward pass for many sessions: whose rows lie where, and the attention function that knows it.

The rows of all sessions lie side by side in one sequence. Everything in a transformer but attention works row by row,
so only attention needs to know the sessions: it writes the new keys and values into each session's own slab and lets
each session's rows look at that slab alone. The past is never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from cloud.engines.few_rows import FewRows
from cloud.engines.kv import Slab
from protocol.errors import ModelError

# Queries of one attention call in fast mode: bounds the mask of a long prefill chunk.
FAST_QUERIES = 64

Rows = slice | list[int]
Write = tuple[Rows, int, int]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How attention calls are cut. query_tile 0: calls as large as a session's rows; key_multiple 1: keys as they are.

    groups: query heads that share a key head; few: sessions with up to so many rows share one call, see `FewRows`.
    """

    groups: int
    query_tile: int = 0
    key_multiple: int = 1
    few: int = 0

    @property
    def exact(self) -> bool:
        return self.query_tile > 0


@dataclass(frozen=True, slots=True)
class Span:
    """One session's new rows in a step: a chunk of its text, then its draft.

    start: first row; past: slots already filled; chunk: rows of text; parents: of the draft, -1 is the last chunk row.
    spare: slots behind the draft's, in which a tree's rows wait until it is known which of them stay.
    """

    slab: Slab
    start: int
    past: int
    chunk: int
    parents: Sequence[int]

    @property
    def rows(self) -> int:
        return self.chunk + len(self.parents)

    @property
    def spare(self) -> int:
        return self.past + self.rows

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def lineage(self, i: int) -> list[int]:
        """Draft indices from the root row's child down to `i`."""
        path = []
        while i >= 0:
            path.append(i)
            i = self.parents[i]
        return path[::-1]

    def positions(self) -> list[int]:
        """The position of each row's token."""
        depth = [0] * len(self.parents)
        for i, parent in enumerate(self.parents):
            depth[i] = 1 if parent < 0 else depth[parent] + 1
        root = self.past + self.chunk - 1
        return [*range(self.past, root + 1), *(root + d for d in depth)]


@dataclass(slots=True)
class Tile:
    """One attention call: some rows of one session against its first `keys` slots.

    writes: (rows, first slot) to put into the slab before the call; rows: the call's queries, in order;
    mask: [1, 1, queries * groups, keys], added to the scores; None where all queries see all keys.
    """

    slab: Slab
    writes: list[Write]
    rows: Rows
    queries: int
    keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class Layout:
    """A step's attention, the same in all layers.

    few: the sessions that share a call; tiles: calls for the others.
    gather: [queries of all tiles] each one's row; order: [rows] where each row's result lies among the queries.
    """

    groups: int
    few: FewRows | None = None
    tiles: list[Tile] = field(default_factory=list)
    gather: torch.Tensor | None = None
    order: torch.Tensor | None = None


def lay_out(spans: Sequence[Span], shape: AttentionShape, dtype: torch.dtype, total_rows: int) -> Layout:
    """Cut the rows of `spans` into attention calls. total_rows: rows of the pass with its padding."""
    layout = Layout(shape.groups)
    few = [span for span in spans if span.rows <= shape.few]
    if few:
        layout.few = FewRows(few, shape.groups)
        spans = [span for span in spans if span.rows > shape.few]
        rows = [row for span in spans for row in range(span.start, span.start + span.rows)]
        layout.gather = torch.tensor(rows, dtype=torch.int64)
    for span in spans:
        layout.tiles += _exact_tiles(span, shape, dtype) if shape.exact else _fast_tiles(span, shape, dtype)
    if shape.exact:
        gather = [row for tile in layout.tiles for row in _indices(tile.rows, tile.queries)]
        order = [0] * total_rows
        for at in reversed(range(len(gather))):
            order[gather[at]] = at
        layout.gather, layout.order = torch.tensor(gather), torch.tensor(order)
    return layout


def _fast_tiles(span: Span, shape: AttentionShape, dtype: torch.dtype) -> list[Tile]:
    """Calls over consecutive rows, each seeing its past and, through a mask, its ancestors among the new rows."""
    sees = torch.ones(span.rows, span.rows, dtype=torch.bool).tril_()  # [rows, rows]
    if not span.is_chain:
        sees[span.chunk :, span.chunk :] = False
        for i in range(len(span.parents)):
            sees[span.chunk + i, [span.chunk + j for j in span.lineage(i)]] = True
    tiles = []
    for a in range(0, span.rows, FAST_QUERIES):
        b = min(a + FAST_QUERIES, span.rows)
        mask = None
        if not bool(sees[a:b, :b].all()):
            mask = torch.zeros(b - a, span.past + b, dtype=dtype)  # [queries, keys]
            mask[:, span.past :].masked_fill_(~sees[a:b, :b], float("-inf"))
            mask = _for_groups(mask, shape.groups)
        new: Write = (slice(span.start, span.start + span.rows), span.past, span.rows)
        writes = [new] if a == 0 else []
        rows = slice(span.start + a, span.start + b)
        tiles.append(Tile(span.slab, writes, rows, b - a, span.past + b, mask))
    return tiles


def _exact_tiles(span: Span, shape: AttentionShape, dtype: torch.dtype) -> list[Tile]:
    """Calls of a fixed number of queries whose key count depends on their positions alone.

    A kernel sums over slots in an order of its own, so a row's ancestors must lie where plain decoding would have put
    them. The paths of a tree therefore take turns in the slots of their positions.
    """
    runs: list[tuple[list[int], list[Write]]] = []  # rows at consecutive positions, writes before them
    first, start, root = span.start, span.past, span.past + span.chunk - 1
    if span.is_chain:
        runs.append(([*range(first, first + span.rows)], [(slice(first, first + span.rows), start, span.rows)]))
    else:
        draft = first + span.chunk
        spare = (slice(draft, first + span.rows), span.spare, len(span.parents))
        runs.append(([*range(first, draft)], [(slice(first, draft), start, span.chunk), spare]))
        inner, seen = set(span.parents), set()
        for leaf in (i for i in range(len(span.parents)) if i not in inner):
            path = span.lineage(leaf)
            new = [i for i in path if i not in seen]
            seen.update(new)
            runs.append(([draft + i for i in new], [([draft + i for i in path], root + 1, len(path))]))
    positions = span.positions()
    tiles = []
    for rows, writes in runs:
        a = 0
        while a < len(rows):
            position = positions[rows[a] - first]
            keys = (position // shape.key_multiple + 1) * shape.key_multiple
            count = min(shape.query_tile, len(rows) - a, keys - position)
            last = torch.arange(position, position + shape.query_tile).clamp_(max=keys - 1)  # [queries]
            mask = torch.zeros(shape.query_tile, keys, dtype=dtype)  # [queries, keys]
            mask.masked_fill_(torch.arange(keys) > last[:, None], float("-inf"))
            mask = _for_groups(mask, shape.groups)
            tiles.append(Tile(span.slab, writes, rows[a : a + count], shape.query_tile, keys, mask))
            a, writes = a + count, []
    return tiles


def _for_groups(mask: torch.Tensor, groups: int) -> torch.Tensor:
    return mask.repeat_interleave(groups, 0)[None, None]


def _indices(rows: Rows, count: int) -> list[int]:
    """The row numbers of `rows`, the first one repeated until there are `count`."""
    found = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows
    return found + found[:1] * (count - len(found))


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: Layout,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over per-session slabs, for transformers' attention interface.

    query: [1, heads, rows, head_dim]; key, value: [1, key heads, rows, head_dim]. Returns [1, rows, heads, head_dim].
    The query heads that share a key head become rows of one product.
    """
    for feature in ("sliding_window", "softcap", "s_aux"):
        if features.get(feature) is not None:
            raise ModelError(f"attention with {feature} is not supported", where=type(module).__name__)
    layer, groups = int(module.layer_idx), layout.groups
    among = None
    if layout.few is not None:
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        among = layout.few.attend(layer, q, k, v, scaling)
    if not layout.tiles:
        assert among is not None
        return among[None], None
    new = torch.cat((key, value))  # [2, key heads, rows, head_dim]
    query = query[0] if layout.gather is None else query[0].index_select(1, layout.gather)
    query = query.unflatten(0, (-1, groups)).transpose(1, 2).flatten(1, 2)[None]  # [1, key heads, queries * groups, …]
    outs = []
    for tile, part in zip(layout.tiles, query.split([tile.queries * groups for tile in layout.tiles], 2), strict=True):
        held = tile.slab.kv[layer]  # [2, key heads, slots, head_dim]
        for rows, slot, count in tile.writes:
            held[:, :, slot : slot + count] = new[:, :, rows]
        keys, values = held[:, None, :, : tile.keys].unbind()
        outs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=tile.mask, scale=scaling))
    out = torch.cat(outs, 2)[0] if len(outs) > 1 else outs[0][0]
    out = out.unflatten(1, (-1, groups)).transpose(0, 1).flatten(1, 2)  # [queries, heads, head_dim]
    if among is not None and layout.gather is not None:
        return among.index_copy_(0, layout.gather, out)[None], None
    return (out if layout.order is None else out.index_select(0, layout.order))[None], None
