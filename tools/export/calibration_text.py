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
    """The calibration texts of a file, thinned out evenly to about `tokens` at most.

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
    step = max(1, -(-sum(map(len, texts)) // tokens))
    kept = tuple(texts[::step])
    digest = hashlib.sha256(b"".join(len(text).to_bytes(4, "little") + text.numpy().tobytes() for text in kept))
    return Corpus(kept, tuple(len(text.text) for text in found[::step]), digest.hexdigest())
