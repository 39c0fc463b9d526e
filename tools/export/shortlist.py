"""Which ids a drafter's head is computed for: the likely ones, since a guess that is never made costs little."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from protocol.errors import ConfigError
from tools.export.quantise import Blocks
from tools.export.quantised import HEAD
from tools.export.sources import Source

BYTES = 256  # of a byte-level tokenizer's alphabet
CORPUS_SHARE = 0.25  # of an id's score; the rest is its place in the vocabulary


def choose(counts: np.ndarray, vocab_size: int, m: int, always: Collection[int]) -> np.ndarray:
    """The m ids with the best score, `always` among them: int32 [m], ascending.

    counts: how often each id was written, [vocab_size]. An id's score mixes its rank by count with its own number: BPE
    merges are learnt in order of frequency, so where a corpus is too small to have met an id, its number still tells.
    Raises ConfigError where `always` alone is more than m, or m more than the vocabulary.
    """
    if not len(always) <= m <= vocab_size:
        raise ConfigError(
            f"{m} ids are not in {len(always)}..{vocab_size}",
            where="shortlist",
            remedy="ask for a number between the ids that must be there and the whole vocabulary",
        )
    ranks = np.empty(vocab_size)
    ranks[np.argsort(-counts[:vocab_size], kind="stable")] = np.arange(vocab_size)
    score = CORPUS_SHARE * ranks + (1 - CORPUS_SHARE) * np.arange(vocab_size)
    score[list(always)] = -1
    return np.sort(np.argsort(score, kind="stable")[:m]).astype(np.int32)


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
    head = blocks[HEAD]
    points = head.zero_points
    kept = replace(
        head,
        packed=head.packed[ids],
        scales=head.scales[ids],
        zero_points=None if points is None else points[ids],
    )
    return {**blocks, HEAD: kept}
