"""Which ids a drafter's head is computed for: the likely ones, since a guess that is never made costs little."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import numpy as np

from protocol.errors import ConfigError
from tools.export.quantise import Blocks, take
from tools.export.quantised import HEAD
from tools.export.sources import Source

BYTES = 256  # of a byte-level tokenizer's alphabet


def choose(counts: np.ndarray, vocab_size: int, m: int, always: Collection[int]) -> np.ndarray:
    """The m likeliest ids, `always` among them: int32 [m], ascending.

    counts: how often each id was written, [vocab_size]. What was written oftener comes first, and of equals, so of all
    that never was, the lower id: BPE learns its merges in order of frequency.
    Raises ConfigError where `always` alone is more than m, or m more than the vocabulary.
    """
    if not len(always) <= m <= vocab_size:
        raise ConfigError(
            f"{m} ids are not in {len(always)}..{vocab_size}",
            where="shortlist",
            remedy="ask for a number between the ids that must be there and the whole vocabulary",
        )
    score = counts[:vocab_size].astype(np.float64)
    score[list(always)] = np.inf
    return np.sort(np.argsort(-score, kind="stable")[:m]).astype(np.int32)


def always(source: Source) -> frozenset[int]:
    """Ids that a head never goes without: those that stop a text, special tokens, and single bytes, with which
    any text can be written.
    """
    described = json.loads(source.tokenizer)
    vocabulary = described["model"]["vocab"]
    special = {token["id"] for token in described["added_tokens"]}
    single = sorted(id for piece, id in vocabulary.items() if len(piece) == 1)[:BYTES]
    return frozenset({*source.stop_ids, *special, *single})


def cut(blocks: Mapping[str, Blocks], ids: np.ndarray) -> dict[str, Blocks]:
    """The matrices of a model with only the rows `ids` [m] of the head. The embedding keeps all of its own."""
    return {**blocks, HEAD: take(blocks[HEAD], ids)}
