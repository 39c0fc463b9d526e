"""Traces for which the formulas' main assumption holds: each guess is right with the same probability."""

from __future__ import annotations

import numpy as np

from tools.traces import Trace

NUM_IDS = 1000
NUM_CANDIDATES = 2


def independent_trace(alpha: float, num_tokens: int, seed: int) -> Trace:
    """A text of `num_tokens` random ids of which the drafter's first guess has each with probability `alpha`,
    whatever came before; where it misses, its second one is right. The drafter's own probabilities say just that.
    """
    rng = np.random.default_rng(seed)
    target = rng.integers(NUM_IDS, size=num_tokens)  # [tokens]
    other = (target + rng.integers(1, NUM_IDS, size=num_tokens)) % NUM_IDS  # [tokens], never the target's
    hit = rng.random(num_tokens) < alpha  # [tokens]
    draft_ids = np.where(hit[:, None], np.stack([target, other], 1), np.stack([other, target], 1))
    return Trace(
        prompt=f"independent acceptance {alpha:g}, seed {seed}",
        target=tuple(target.tolist()),
        draft_ids=tuple(map(tuple, draft_ids.tolist())),
        draft_p=((alpha, 1 - alpha),) * num_tokens,
        p_target=tuple(np.where(hit, alpha, 1 - alpha).tolist()),
    )
