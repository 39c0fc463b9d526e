"""What a drafter is calibrated on: text that a target wrote, of those topics that no measurement keeps to itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import ModelError
from tools.corpus import text as written


@dataclass(frozen=True)
class Corpus:
    """texts: each a prompt and what the target wrote behind it, int64 [tokens]; written: how many of them it wrote.

    digest: SHA-256 of the ids, in hex.
    """

    texts: tuple[torch.Tensor, ...]
    written: tuple[int, ...]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts)


def read(path: Path, vocab_size: int, tokens: int) -> Corpus:
    """The calibration texts of a file; of more than `tokens`, as many texts, evenly spread, as have about that many.

    Raises ConfigError as `tools.corpus.text.read` does, and ModelError where ids are not of a vocabulary of so many.
    """
    found = written.read(path, "calibration")
    texts = [torch.tensor(text.prompt + text.text) for text in found]
    if (largest := max(int(text.max()) for text in texts)) >= vocab_size:
        raise ModelError(
            f"id {largest} is not in the drafter's vocabulary of {vocab_size}",
            where=str(path),
            remedy="give text that a target of this drafter's family wrote",
        )
    count = max(1, min(len(texts), len(texts) * tokens // sum(map(len, texts))))
    chosen = [i * len(texts) // count for i in range(count)]
    kept = tuple(texts[i] for i in chosen)
    digest = hashlib.sha256(b"".join(len(text).to_bytes(4, "little") + text.numpy().tobytes() for text in kept))
    return Corpus(kept, tuple(len(found[i].text) for i in chosen), digest.hexdigest())
