"""What every engine checks of a session's part of a step before it touches anything."""

from __future__ import annotations

from cloud.engines.base import Work


def fault_of(work: Work, pending: int, *, max_draft: int, vocab_size: int) -> str:
    """Why `work` cannot be done, or "". pending: ids of the session's text that are not yet evaluated."""
    if not 1 <= work.rows <= pending:
        return f"{work.rows} rows were asked for, {pending} are pending"
    if len(work.draft) != len(work.parents):
        return f"{len(work.draft)} draft ids have {len(work.parents)} parents"
    if not work.draft:
        return ""
    if work.rows != pending:
        return "a draft came with a chunk that does not reach the end of the text"
    if len(work.draft) > max_draft:
        return f"{len(work.draft)} draft rows are more than {max_draft}"
    if min(work.draft) < 0 or max(work.draft) >= vocab_size:
        return f"a draft id is not in 0..{vocab_size - 1}"
    if any(not -1 <= parent < i for i, parent in enumerate(work.parents)):
        return "a draft id's parent is not an earlier draft id"
    return ""
