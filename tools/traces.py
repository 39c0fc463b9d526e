"""Recorded drafting: what a target wrote, and what a drafter would have proposed at each position of it.

A trace file is JSON, a list of objects with the fields of `Trace`. Off the target's text a trace says nothing: there a
replay draws the drafter's candidates from a random position of the same trace and counts them all as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.errors import ConfigError


class Trace(msgspec.Struct, frozen=True):
    """One text. prompt: the user's message; target: [n] ids that the target wrote; draft_ids, draft_p: [n][k] the
    drafter's best ids at each of these positions, given the target's own text before it, best first, with their
    probabilities; p_target: [n] the drafter's probability of the id that the target wrote; prompt_ids: what both read
    before it, the prompt in the chat template, empty where that was not recorded.
    """

    prompt: str
    target: tuple[int, ...]
    draft_ids: tuple[tuple[int, ...], ...]
    draft_p: tuple[tuple[float, ...], ...]
    p_target: tuple[float, ...]
    prompt_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(self.target), len(self.draft_ids), len(self.draft_p), len(self.p_target)}
        if sizes == {0} or len(sizes) != 1:
            raise ValueError(f"`target`, `draft_ids`, `draft_p`, `p_target` have lengths {sorted(sizes)}")
        for ids, p in zip(self.draft_ids, self.draft_p, strict=True):
            if len(ids) != len(p) or not ids:
                raise ValueError("each of `draft_ids` needs as many probabilities in `draft_p`, at least one")

    @property
    def acceptance(self) -> float:
        """How often the drafter's first candidate is what the target wrote."""
        return sum(ids[0] == id for ids, id in zip(self.draft_ids, self.target, strict=True)) / len(self.target)


FOLDER = Path(__file__).parent / "twin" / "traces"
RECORDED = FOLDER / "qwen-coder-0.5b-to-1.5b.json"
"""Four chat prompts, 128 greedy tokens each of Qwen2.5-Coder-1.5B-Instruct, with the eight best of the 0.5B one."""
RECORDED_CODE = FOLDER / "qwen-coder-0.5b-to-1.5b-code.json"
"""Six prompts that hold code or JSON to change, up to 128 greedy tokens each of the same target, with the eight best of
the 4-bit drafter."""
RECORDED_SMOLLM2 = FOLDER / "smollm2-135m-q4-to-135m.json"
"""Chat prompts, up to 80 greedy float32 tokens each of SmolLM2-135M-Instruct, with the best two of its 4-bit self."""


def load(path: str | Path = RECORDED) -> list[Trace]:
    """The traces of a file. Raises ConfigError that names what is wrong."""
    try:
        traces = msgspec.json.decode(Path(path).read_bytes(), type=list[Trace])
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"is no trace file: {error}", where=str(path), remedy="See tools/traces.py") from None
    if not traces:
        raise ConfigError("holds no trace", where=str(path))
    return traces


def save(path: str | Path, traces: Sequence[Trace]) -> None:
    Path(path).write_bytes(msgspec.json.encode(list(traces)))
