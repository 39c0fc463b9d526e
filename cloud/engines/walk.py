"""Certifying a draft: which of its ids are the ones that the target draws."""

from __future__ import annotations

from collections.abc import Sequence


def walk(drawn: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Walk a draft by equality.

    drawn[0] is the id drawn behind the root row, drawn[1 + i] the one behind draft[i]; parents[i] is the index of
    draft[i]'s parent, -1 for the root row. Returns the ids now appended to the text (the accepted ones and the one
    drawn behind the last of them) and the indices of the accepted draft ids, root side first.
    """
    children = {(parent, id): i for i, (parent, id) in reversed(list(enumerate(zip(parents, draft, strict=True))))}
    ids, path, at = [drawn[0]], [], -1
    while (at := children.get((at, ids[-1]), -1)) >= 0:
        path.append(at)
        ids.append(drawn[1 + at])
    return ids, path
