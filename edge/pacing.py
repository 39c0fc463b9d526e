"""When gathered guesses leave: just in time for the verifier's next step, at most twice a step."""

from __future__ import annotations

from math import inf

from edge.window import Window

# Found by replaying recorded drafts: fewer steps and bytes, and hardly a token later.
FIRST_GUESSES, UNSURE = 3, 0.5
WORTH_A_MESSAGE = 0.12  # what is less likely to be still right waits for the verdict on what is under way
GATHERED_SHARE = 0.85  # of a step that has begun with our last draft: what leaves then is in time for the next


def departure(window: Window, now: float, pass_s: float, *, paced: bool, enough: int = FIRST_GUESSES) -> float:
    """When the unsent guesses should leave; not paced, as soon as they are made.

    pass_s: of the pass that begins now, 0 when none does; nothing can leave before its end. enough: guesses that are
    worth waking a verifier that waits for drafts.

    A verifier that steps without pause takes guesses at its next step. One that waits for drafts gets a few at once,
    or as many as the drafter is sure of, and what comes during a step before its end.
    """
    unsent = window.unsent
    if not unsent:
        return inf
    if not paced:
        return now
    if window.in_flight and max(node.note.path for node in unsent) < WORTH_A_MESSAGE:
        return inf
    if not window.request.patience_s:
        return window.cadence.departure(now, pass_s)
    if not window.in_flight:
        tip = unsent[-1]
        full = not pass_s or len(unsent) >= enough or tip.note.path < UNSURE or not window.can_guess(tip)
        return now if full else inf
    return window.cadence.sent_at + GATHERED_SHARE * window.cadence.step_s
