"""Text that a target wrote, as `python -m tools.corpus write` leaves it: what a drafter is calibrated on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from protocol.errors import ConfigError, ModelError

CALIBRATION = "calibration"


class Line(msgspec.Struct, frozen=True):
    """prompt, text: token ids; split: "calibration", or else not to be looked at here."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    split: str


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

    Raises ConfigError for a file that cannot be read or has nothing for calibration, ModelError for one whose ids are
    not of a vocabulary of `vocab_size`.
    """
    try:
        lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"not a corpus: {error}", where=str(path), remedy="write one with `python -m tools.corpus write`"
        ) from error
    lines = [line for line in lines if line.split == CALIBRATION]
    texts = [torch.tensor(line.prompt + line.text) for line in lines]
    if not texts:
        raise ConfigError(f"no text for {CALIBRATION}", where=str(path), remedy="write more of it")
    if (largest := max(int(text.max()) for text in texts)) >= vocab_size:
        raise ModelError(
            f"id {largest} is not in the drafter's vocabulary of {vocab_size}",
            where=str(path),
            remedy="give text that a target of this drafter's family wrote",
        )
    step = max(1, -(-sum(map(len, texts)) // tokens))
    kept = tuple(texts[::step])
    digest = hashlib.sha256(b"".join(len(text).to_bytes(4, "little") + text.numpy().tobytes() for text in kept))
    return Corpus(kept, tuple(len(line.text) for line in lines[::step]), digest.hexdigest())
