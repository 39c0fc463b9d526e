"""How well a drafter guesses a text that the target wrote, and how surely one drafter differs from another.

All at T = 0 and with the target's own text behind every guess, in which a draft is right exactly where each of its
tokens is: a chain of guesses is accepted up to its first miss, so runs of hits are what a round would accept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tools.bench.record import BOUND


@dataclass(frozen=True)
class Scored:
    """One text. hits: bool [n], where the first guess is the target's token; nll: float64 [n], minus the natural
    logarithm of the probability that the drafter gave it, inf where it gave none.
    """

    hits: np.ndarray
    nll: np.ndarray


def score(logits: torch.Tensor, text: Sequence[int], ids: np.ndarray | None = None) -> Scored:
    """Of logits [n, vocab] at the positions of `text` [n]. ids: all that may be guessed, int [m] ascending."""
    written = torch.tensor(text)
    places = written
    if ids is not None:
        kept = torch.from_numpy(ids.astype(np.int64))
        logits = logits[:, kept]
        places = torch.searchsorted(kept, written).clamp(max=len(ids) - 1)
        absent = kept[places] != written
    hits = logits.argmax(1) == places
    nll = logits.logsumexp(1) - logits.gather(1, places[:, None])[:, 0]
    if ids is not None:
        hits &= ~absent
        nll[absent] = math.inf
    return Scored(hits.numpy(), nll.double().numpy())


def acceptance(texts: Sequence[Scored]) -> float:
    return float(np.concatenate([text.hits for text in texts]).mean())


def perplexity(texts: Sequence[Scored]) -> float:
    """inf where the drafter cannot guess one of the tokens at all."""
    return math.exp(float(np.concatenate([text.nll for text in texts]).mean()))


@dataclass(frozen=True)
class Difference:
    """Of a mean a position, this drafter's minus the other's. bound: half the width of its 95 % interval."""

    mean: float
    bound: float


def paired(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Difference:
    """Of values a position [n_i] in each of the same texts.

    The variance is the greater of two: that of positions taken as independent (for hits McNemar's), and that of whole
    texts, which does not assume it (the cluster-robust sandwich with k / (k - 1)). Where one text is all there is, the
    second is unknown and so is the bound: inf.
    """
    differences = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(ours, theirs, strict=True)]
    sizes = np.array([len(d) for d in differences])
    total, texts = sizes.sum(), len(sizes)
    mean = sum(d.sum() for d in differences) / total
    if texts < 2:
        return Difference(float(mean), math.inf)
    alone = sum(((d - mean) ** 2).sum() for d in differences)
    clustered = sum((d.sum() - mean * len(d)) ** 2 for d in differences) * texts / (texts - 1)
    return Difference(float(mean), BOUND * math.sqrt(max(alone, clustered)) / total)


def tokens_a_round(texts: Sequence[Scored], draft: int) -> float:
    """E[A] as the texts have it: of chains of `draft` guesses from every position with so many behind it, the accepted
    ones and the target's own token after them. nan where no text is that long.
    """
    totals, places = 0, 0
    for text in texts:
        starts = len(text.hits) - draft + 1
        alive = np.ones(max(starts, 0), bool)
        places += len(alive)
        for step in range(draft):
            alive &= text.hits[step : step + len(alive)]
            totals += int(alive.sum())
    return 1 + totals / places if places else math.nan


def formula(alpha: float, draft: int) -> float:
    """E[A] if every guess were right with the same probability, whatever came before: (1 - a^(g+1)) / (1 - a)."""
    return draft + 1.0 if alpha == 1 else (1 - alpha ** (draft + 1)) / (1 - alpha)
