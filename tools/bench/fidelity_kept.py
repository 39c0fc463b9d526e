"""Scores on disk: a run that was stopped goes on, and a drafter that is added later costs only its own time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.bench.fidelity_scores import Scored


class Kept:
    """A folder with one file for each drafter, named by a digest of all that its scores depend on."""

    def __init__(self, folder: Path | None, *facts: object) -> None:
        """folder: None keeps nothing; facts: what every score of this run depends on, as `repr` tells it."""
        self._folder, self._facts = folder, facts
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, *facts: object) -> list[Scored] | None:
        path = self._path(facts)
        if path is None or not path.exists():
            return None
        with np.load(path) as arrays:
            ends = arrays["sizes"].cumsum()[:-1]
            parts = zip(np.split(arrays["hits"], ends), np.split(arrays["nll"], ends), strict=True)
            return [Scored(hits, nll) for hits, nll in parts]

    def save(self, texts: Sequence[Scored], *facts: object) -> None:
        path = self._path(facts)
        if path is None:
            return
        part = path.with_suffix(".part.npz")
        np.savez(
            part,
            sizes=np.array([len(text.hits) for text in texts]),
            hits=np.concatenate([text.hits for text in texts]),
            nll=np.concatenate([text.nll for text in texts]),
        )
        part.replace(path)

    def _path(self, facts: tuple[object, ...]) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(repr((self._facts, facts)).encode()).hexdigest()[:24]}.npz"
