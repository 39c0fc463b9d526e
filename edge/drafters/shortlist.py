"""The ids that a drafter's head is computed for, where that is not all of them: `head.ids` beside the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.drafters.manifest import HEAD_IDS, Manifest
from protocol.errors import ModelError

HeadIds = NDArray[np.int32]  # [m], ascending: place in the head -> id


def read(directory: Path, facts: Manifest) -> HeadIds | None:
    """The shortlist of a drafter's directory; None where its head is whole.

    Raises ModelError for a file that is missing or is not the manifest's.
    """
    if not facts.shortlist:
        return None
    path = directory / HEAD_IDS
    try:
        ids = np.frombuffer(path.read_bytes(), "<i4").astype(np.int32)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), remedy="export the model again") from error
    if ids.size != facts.shortlist or ids[0] < 0 or ids[-1] >= facts.vocab_size or (np.diff(ids) <= 0).any():
        raise ModelError(
            f"it does not hold {facts.shortlist} ascending ids below {facts.vocab_size}",
            where=str(path),
            remedy="export the model again",
        )
    return ids


def spread(logits: NDArray[np.float32], ids: HeadIds, vocab_size: int) -> NDArray[np.float32]:
    """Logits [m or more] of a head as logits [vocab_size] of ids: minus infinity for those that it leaves out."""
    whole = np.full(vocab_size, -np.inf, np.float32)
    whole[ids] = logits[: ids.size]
    return whole
