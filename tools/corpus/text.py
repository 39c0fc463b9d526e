"""The corpus file: one JSON object a line, written as texts end, so that a run that was killed can go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from protocol.errors import ConfigError
from tools.corpus.prompts import Split


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One text. prompt: ids as the chat template writes them; text: what the target wrote behind them."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    split: Split


def read(path: Path, split: Split | None = None) -> list[Written]:
    """The texts of a file, those of one split if asked for.

    Raises ConfigError for a file that cannot be read, a line that is no text, or nothing of that split.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from error
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(msgspec.json.decode(line, type=Written))
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"not a text: {error}", where=f"{path}, line {number}", remedy="write it with `tools.corpus write`"
            ) from error
    found = [text for text in texts if split in (None, text.split)]
    if not found:
        raise ConfigError(f"it holds no {split or 'text'}", where=str(path), remedy="write more of it")
    return found


def sample(path: Path, split: Split, positions: int | None, vocab_size: int) -> list[Written]:
    """Whole texts of a split until `positions` tokens are together, all if None, in an order that has nothing to do
    with their topics.

    Raises ConfigError as `read` does, and where an id is not in the vocabulary of who shall read them.
    """
    texts = sorted(read(path, split), key=lambda text: hashlib.sha256(repr(text.prompt).encode()).digest())
    ends = np.cumsum([len(text.text) for text in texts])
    texts = texts[: int(np.searchsorted(ends, positions or ends[-1])) + 1]
    if (highest := max(max(text.prompt + text.text) for text in texts)) >= vocab_size:
        raise ConfigError(
            f"id {highest} is not in the drafter's vocabulary of {vocab_size}",
            where=str(path),
            remedy="give the corpus of a target of the drafter's family",
        )
    return texts


def resume(path: Path) -> list[Written]:
    """What an earlier run has written to `path`; a last line that was cut off is taken away.

    Raises ConfigError as `read` does.
    """
    if not path.exists():
        return []
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        with open(path, "r+b") as file:
            file.truncate(len(kept))
    return read(path) if kept else []


def append(path: Path, text: Written) -> None:
    """Write a text as one whole line, in one call."""
    with open(path, "ab", buffering=0) as file:
        file.write(msgspec.json.encode(text) + b"\n")


def counts(texts: Iterable[Written], vocab_size: int) -> np.ndarray:
    """How often each id was written: int64 [vocab_size]."""
    ids = np.fromiter((id for text in texts for id in text.text), np.int64)
    return np.bincount(ids, minlength=vocab_size)[:vocab_size]
