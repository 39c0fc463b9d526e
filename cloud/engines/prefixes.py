"""What the texts of a tenant have in common: a tree of runs of whole blocks, each stored once.

A path from a root down is the beginning of some text. A run that a text leaves half-way is cut in two there, so that
every run is seen whole or not at all (the radix tree of SGLang, Zheng et al., 2312.07104). Tenants have roots of their
own: how fast a prompt is read tells whether its beginning was known, and must not tell what another tenant asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloud.engines.kv import Place

Ids = NDArray[np.int32]  # [tokens]


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of a text, from slot `start` up to `end`. A root is an empty run.

    ids: of this run alone; place: where its rows are; users: open sessions that see it, holders: all texts that do,
    counting those that see a longer beginning; used: when it last was, on the cache's clock.
    """

    parent: Run | None
    ids: Ids
    start: int
    place: Place
    children: list[Run] = field(default_factory=list)
    users: int = 0
    holders: int = 0
    used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def path(self) -> list[Run]:
        """The runs from the root's child down to this one."""
        found, run = [], self
        while run.parent is not None:
            found.append(run)
            run = run.parent
        return found[::-1]


def root() -> Run:
    return Run(None, np.empty(0, np.int32), 0, Place(0, 0, 0))


def common(a: Ids, b: Ids) -> int:
    """How many ids two texts begin with alike."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def known(top: Run, ids: Ids, block: int) -> Run:
    """The last of the runs that `ids` begin with, in whole blocks, cut where they end; `top` itself where none does."""
    run = top
    while True:
        for child in run.children:
            same = common(child.ids, ids[child.start :]) // block * block
            if same:
                break
        else:
            return run
        if same < len(child.ids):
            return _split(child, same)
        run = child


def grow(run: Run, ids: Ids, place: Place) -> Run:
    """A new run behind another one."""
    child = Run(run, ids, run.end, place)
    run.children.append(child)
    return child


def every(top: Run) -> Iterator[Run]:
    """All runs below `top`."""
    found = list(top.children)
    for run in found:
        yield run
        found += run.children


def _split(run: Run, tokens: int) -> Run:
    """Cut a run after so many of its tokens. `run` stays the end of those who see it; returns the beginning."""
    assert run.parent is not None
    upper = Run(run.parent, run.ids[:tokens], run.start, run.place, [run], run.users, run.holders, run.used)
    run.parent.children[run.parent.children.index(run)] = upper
    run.parent, run.ids, run.start, run.place = upper, run.ids[tokens:], run.start + tokens, run.place.behind(tokens)
    return upper
