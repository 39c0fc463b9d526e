"""Whose keys and values are held, in how many blocks, and what is forgotten first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloud.engines.kv import KvShape, Slab, Store
from cloud.engines.prefixes import Ids, Run, common, every, grow, known, root

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")


@dataclass(slots=True, eq=False)
class Held:
    """What is held of one text: of an open session's, or of one that was closed and may be gone on from.

    ids: its beginning, with which other texts are compared: of an open session what it was opened with, of a closed
    one all that was evaluated. prompt: how many ids it was opened with; evaluated: tokens whose rows are held;
    run: where the part that it shares ends; blocks: without those; mappings: of the system's that its slab takes;
    used: when it was written last.
    """

    tenant: str
    ids: Ids
    slab: Slab
    run: Run
    prompt: int
    evaluated: int = 0
    blocks: int = 0
    mappings: int = 0
    is_open: bool = True
    used: int = 0


class KvCache:
    """The slabs of all sessions within one budget of blocks.

    A block is `shape.block` tokens. Closed texts and runs that no open session sees are forgotten, the longest unused
    first, when blocks are needed.
    """

    def __init__(self, shape: KvShape, num_blocks: int, new_slab: Callable[[], Slab]) -> None:
        self.num_blocks, self.block = num_blocks, shape.block
        self._shape, self._new_slab = shape, new_slab
        self._store = Store(shape)
        self._roots: dict[str, Run] = {}
        self._open: list[Held] = []
        self._closed: list[Held] = []
        self._allocated = self._mappings = 0
        self._clock = 0
        self._max_mappings = int(MAX_MAP_COUNT.read_text()) // 2  # the rest is for the libraries

    @property
    def free_blocks(self) -> int:
        """Blocks that no open session holds."""
        shared = sum(len(run.ids) for run in self._runs() if run.users) // self.block
        return self.num_blocks - shared - sum(held.blocks for held in self._open)

    @property
    def retained_blocks(self) -> int:
        """Blocks that only closed texts hold."""
        return self.free_blocks - (self.num_blocks - self._allocated)

    def blocks(self, held: Held) -> int:
        """Blocks that no other open session holds: what evicting this one gives."""
        return held.blocks + sum(len(run.ids) for run in held.run.path() if run.users == 1) // self.block

    def blocks_up_to(self, held: Held, slots: int) -> int:
        """The same, once slots up to `slots` are written."""
        others = sum(len(run.ids) for run in held.run.path() if run.users > 1)
        return -(-slots // self.block) - others // self.block

    def open(self, tenant: str, ids: Sequence[int]) -> Held:
        """A new session's part, with as much of its text as is held already. May raise ModelError; see `Slab`."""
        start = np.array(ids, np.int32)
        self._clock += 1
        held = self._take_over(tenant, start)
        if held is None:
            top = self._roots.setdefault(tenant, root())
            held = Held(tenant, start, self._new_slab(), top, len(start))
            self._open.append(held)
            self._account(held)
        self.advance(held, len(start))
        return held

    def _take_over(self, tenant: str, ids: Ids) -> Held | None:
        """The closed text that `ids` go on from, as an open session's.

        The next turn of a conversation begins with the whole prompt of the turn before. A text that has only the
        beginning of it is another conversation, and shares.
        """
        found, most = None, 0
        for held in self._closed:
            alike = common(ids, held.ids) if held.tenant == tenant else 0
            same = min(alike, len(ids) - 1)
            if same > most and alike >= min(held.prompt, held.evaluated) and same >= held.run.end:
                found, most = held, same
        if found is None:
            return None
        self._closed.remove(found)
        self._see_less(found)
        found.ids, found.prompt, found.evaluated, found.is_open = ids, len(ids), most, True
        self._see_more(found, found.run)
        self._open.append(found)
        found.slab.trim(most)
        self._account(found)
        return found

    def advance(self, held: Held, length: int) -> int:
        """Let a session see what others have evaluated of its text of `length` tokens; returns the tokens it gains.

        The last id stays to be evaluated, for a token to be drawn behind it.
        """
        if not self._can_map():
            return 0
        ids = held.ids[: length - 1]
        run = known(self._roots[held.tenant], ids, self.block)
        most, source = run.end, None
        for other in (*self._open, *self._closed):
            if other is not held and other.tenant == held.tenant and other.evaluated > most:
                same = self.whole(held, other, min(length - 1, other.evaluated))
                if same > most:
                    most, source = same, other
        gain = most - held.evaluated
        if gain <= 0:
            return 0
        if source is not None:
            self._see(source, run)
            run = self._share(source, most)
        self._see(held, run)
        held.evaluated = most
        return gain

    def whole(self, held: Held, other: Held, limit: int) -> int:
        """Tokens of the whole blocks, within the first `limit` tokens, with which two texts begin alike."""
        return min(common(held.ids, other.ids), limit) // self.block * self.block

    def reserve(self, held: Held, slots: int) -> bool:
        """Let a session write slots up to `slots`. False where the blocks do not suffice."""
        need = -(-slots // self.block) - -(-held.slab.top // self.block)
        while need > 0 and self._allocated + need > self.num_blocks:
            if not self._forget_oldest():
                return False
        self._clock += 1
        held.used = self._clock
        held.slab.top = max(held.slab.top, slots)
        self._account(held)
        return True

    def evict(self, held: Held) -> None:
        """Give an open session's blocks back."""
        self._see_less(held)
        held.run, held.slab, held.evaluated = self._roots[held.tenant], self._new_slab(), 0
        self._account(held)

    def close(self, held: Held, ids: Sequence[int]) -> None:
        """End a session's part; what is held of `ids`, the evaluated part of its text, is held on."""
        self._clock += 1
        self._open.remove(held)
        self._see_less(held)
        held.is_open = False
        self._see_more(held, held.run)
        self._closed.append(held)
        held.ids, held.evaluated, held.used = np.array(ids, np.int32), len(ids), self._clock
        if held.evaluated > held.run.end:
            held.slab.trim(held.evaluated)
            self._account(held)
        else:
            self._forget(held)

    def _share(self, source: Held, end: int) -> Run:
        """Store a text's own blocks up to slot `end`, where it and others see them."""
        start = source.run.end
        run = grow(source.run, source.ids[start:end], source.slab.give(self._store, start, end))
        self._allocated += len(run.ids) // self.block
        self._see_less(source)
        self._see_more(source, run)
        self._account(source)
        return run

    def _see(self, held: Held, run: Run) -> None:
        """Show a text the runs down to `run`, unless it sees more than them."""
        if run.end <= held.run.end:
            return
        for new in run.path()[len(held.run.path()) :]:
            held.slab.see(self._store, new.place, new.start, new.end)
        self._see_less(held)
        self._see_more(held, run)
        self._account(held)

    def _see_more(self, held: Held, run: Run) -> None:
        held.run = run
        for seen in run.path():
            seen.holders += 1
            seen.users += held.is_open
            seen.used = self._clock

    def _see_less(self, held: Held) -> None:
        for seen in held.run.path():
            seen.holders -= 1
            seen.users -= held.is_open
            if held.is_open:
                seen.used = self._clock

    def _forget_oldest(self) -> bool:
        """Forget what was not used for the longest time. A run goes after all that see it."""
        runs = [run for run in self._runs() if not run.holders and not run.children]
        oldest_run = min(runs, key=lambda run: run.used, default=None)
        oldest = min(self._closed, key=lambda held: held.used, default=None)
        if oldest is not None and (oldest_run is None or oldest.used <= oldest_run.used):
            self._forget(oldest)
        elif oldest_run is not None and oldest_run.parent is not None:
            oldest_run.parent.children.remove(oldest_run)
            self._store.free(oldest_run.place, len(oldest_run.ids))
            self._allocated -= len(oldest_run.ids) // self.block
        else:
            return False
        return True

    def _forget(self, held: Held) -> None:
        self._see_less(held)
        self._closed.remove(held)
        self._allocated -= held.blocks
        self._mappings -= held.mappings

    def _account(self, held: Held) -> None:
        depth = len(held.run.path())
        blocks, mappings = held.slab.own_blocks, 1 + (self._shape.regions * (1 + depth) if depth else 0)
        self._allocated += blocks - held.blocks
        self._mappings += mappings - held.mappings
        held.blocks, held.mappings = blocks, mappings

    def _runs(self) -> Iterator[Run]:
        for top in self._roots.values():
            yield from every(top)

    def _can_map(self) -> bool:
        """Whether the system lets two more texts see a run further, once old ones are forgotten."""
        new = 4 * self._shape.regions
        while self._mappings + new > self._max_mappings and self._closed:
            self._forget(min(self._closed, key=lambda held: held.used))
        return self._mappings + new <= self._max_mappings
