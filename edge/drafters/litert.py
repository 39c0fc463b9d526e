"""The LiteRT drafter: a `.tflite` language model with prefill and decode signatures and its cache handed in and out.

The form is the one that litert-torch's generative exporter writes. There `input_pos` is at once the slot that a row is
written to and its position, so branches of a tree cannot lie side by side. One branch at a time lies behind the text:
each row's keys and values are taken out of the cache when it has been evaluated, and put back where another branch is
gone on with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.drafters import manifest
from edge.drafters.cached import CachedDrafter, Seen
from protocol.errors import ModelError

HIDDEN = -1e9  # added to a score before softmax: its exponential is 0 in float32
PREFILL = re.compile(r"prefill(_\d+)?")
CACHE = "kv_cache_"  # kv_cache_k_0, kv_cache_v_0, kv_cache_k_1, …
FEEDS = {"tokens", "input_pos", "mask"}  # a mask is optional; without one the model hides what is later by itself
PRODUCTS = ("FULLY_CONNECTED", "BATCH_MATMUL")
BUILT_IN = "LiteRT's own kernels"
PROBE = 1  # the position of a row that is evaluated to see where the caches take it

Kept = list[NDArray[Any]]  # one row's part of each cache


class LitertDrafter(CachedDrafter):
    """A `Drafter` for a directory that `python -m tools.export litert` wrote."""

    @classmethod
    def load(
        cls, directory: str | Path, threads: int = 1, context: int | None = None, *, verify: bool = False
    ) -> LitertDrafter:
        """Load a model directory.

        context: tokens, at most the length of the cache that the file was converted with, which is the default.
        verify: check the weights against the manifest's digest, which reads them once more.
        Raises ModelError for a file that is missing, corrupt, not the manifest's or not of this form, or where
        ai-edge-litert is not installed.
        """
        directory = Path(directory)
        facts = manifest.read(directory, "drafter", verify=verify)
        path = directory / facts.weights_files[0]
        forward = LitertForward(open_file(path, threads), str(path))
        if forward.width < facts.vocab_size:
            raise ModelError(
                f"gives {forward.width} logits, but the tokenizer has {facts.vocab_size} ids",
                where=str(path),
                remedy="take the tokenizer of the model that was converted",
            )
        forward.capacity = min(context or forward.capacity, forward.capacity, facts.context)
        return cls(forward, facts)


class LitertForward:
    """A `Forward`: prefill in the signatures' own lengths, everything whose logits are wanted row by row.

    A slot behind the text is a number in the books only: what lies at the file's own slots there is one branch.
    """

    def __init__(self, interpreter: Any, where: str) -> None:
        """where: the file, for errors. Raises ModelError for a model of another form."""
        self._decode, self._prefill = _signatures(interpreter, where)
        inputs = self._decode.get_input_details()
        mask = inputs.get("mask")
        self._masked = mask and mask["dtype"]
        self._slots = int(mask["shape"][-1]) if mask else 0
        self._cache = {
            name: np.ones(inputs[name]["shape"], inputs[name]["dtype"]) for name in inputs if name.startswith(CACHE)
        }
        self._axes = self._find_axes(where)
        found = {self._cache[name].shape[axis] for name, axis in self._axes.items()}
        if len(found) != 1 or self._slots not in (0, *found):
            raise _another_form(
                f"its caches and its mask are of several lengths, {sorted(found)} and {self._slots}", where
            )
        (self._slots,) = found
        self.capacity, self.provider = self._slots, _runs_on(interpreter)
        self._rows: dict[int, Kept] = {}  # by slot, of the tree
        self._lying: dict[int, Kept] = {}  # which row of the tree lies at a slot of the file
        self.width = int(self._decode.get_output_details()["logits"]["shape"][-1])
        self._logits = np.empty((0, self.width), np.float32)

    def run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> NDArray[np.float32]:
        """See `Forward.run`."""
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self.width), np.float32)
        length = start if tree is None else start + len(ids) - tree.shape[1]
        self._settle(length, start)
        if tree is None:
            self._chain(ids, start, wanted)
        else:
            places = {row: place for place, row in enumerate(wanted)}
            for row, (id, position, seen) in enumerate(zip(ids, positions, tree, strict=True)):
                *branch, own = (length + np.flatnonzero(seen)).tolist()
                for place, slot in enumerate(branch, length):
                    self._lay(place, self._rows[slot])
                logits = self._one(id, position)
                self._lying[position] = self._rows[own] = [view[position].copy() for view in self._views()]
                if row in places:
                    self._logits[places[row]] = logits
        return self._logits[: len(wanted)]

    def move(self, slots: Sequence[int], first: int) -> None:
        """See `Forward.move`: in the books alone. The next pass lays what has become text where it belongs."""
        earlier = {slot: row for slot, row in self._rows.items() if slot < first}
        self._rows = earlier | {first + i: self._rows[slot] for i, slot in enumerate(slots)}

    def _settle(self, length: int, start: int) -> None:
        """Lay the rows that have become text at their slots, and forget those from `start` on."""
        for slot, row in self._rows.items():
            if slot < length:
                self._lay(slot, row)
        self._rows = {slot: row for slot, row in self._rows.items() if length <= slot < start}
        self._lying = {slot: row for slot, row in self._lying.items() if length <= slot}

    def _lay(self, place: int, row: Kept) -> None:
        """Make `row` the one that lies at a slot of the file."""
        if self._lying.get(place) is not row:
            for view, part in zip(self._views(), row, strict=True):
                view[place] = part
            self._lying[place] = row

    def _chain(self, ids: Sequence[int], start: int, wanted: Sequence[int]) -> None:
        """Evaluate a text's next ids, the logits behind the wanted ones into their places."""
        self._lying.clear()
        done = 0
        for place, row in enumerate(wanted):
            self._fill(ids[done:row], start + done)
            self._logits[place] = self._one(ids[row], start + row)
            done = row + 1
        self._fill(ids[done:], start + done)

    def _fill(self, ids: Sequence[int], start: int) -> None:
        """Evaluate a text's next ids for their keys and values alone."""
        done = 0
        while done < len(ids):
            # The slots behind the text are free, so a pass may be filled up with anything; at most by half.
            most = min(2 * (len(ids) - done), self._slots - start - done)
            length = max((length for length in self._prefill if length <= most), default=1)
            part = list(ids[done : done + length])
            if length in self._prefill:
                self._pass(self._prefill[length], part + [0] * (length - len(part)), start + done)
            else:
                self._one(part[0], start + done)
            done += len(part)

    def _one(self, id: int, position: int) -> NDArray[np.float32]:
        """Evaluate one row at its position: its logits [width]."""
        return self._pass(self._decode, [id], position)["logits"].reshape(-1)

    def _pass(self, runner: Any, ids: Sequence[int], first: int) -> dict[str, NDArray[Any]]:
        """Run a signature for rows at the positions first, first + 1, …; its outputs, of which the cache is kept."""
        positions = np.arange(first, first + len(ids), dtype=np.int32)  # [rows]
        feeds = {"tokens": np.array([ids], np.int32), "input_pos": positions}
        if self._masked is not None:
            seen = np.arange(self._slots) <= positions[:, None]  # [rows, slots]
            mask = seen if self._masked is np.bool_ else np.where(seen, 0, HIDDEN)
            feeds["mask"] = mask[None, None].astype(self._masked)
        outputs: dict[str, NDArray[Any]] = runner(**feeds, **self._cache)
        self._cache = {name: outputs[name] for name in self._cache}
        return outputs

    def _views(self) -> Iterator[NDArray[Any]]:
        """Each cache as [slots, …]."""
        for name, cache in self._cache.items():
            yield np.moveaxis(cache, self._axes[name], 0)

    def _find_axes(self, where: str) -> dict[str, int]:
        """The axis of each cache that counts slots. Converters differ in it, so a row shows where it is written to."""
        before = self._cache
        self._pass(self._decode, [0], PROBE)
        axes: dict[str, int] = {}
        for name, now in self._cache.items():
            changed = np.moveaxis(np.argwhere(now != before[name]), 1, 0)  # [axes, changed elements]
            where_to = [axis for axis, places in enumerate(changed) if set(places.tolist()) == {PROBE}]
            if len(where_to) != 1:
                raise _another_form(f"a row at position {PROBE} is not written to slot {PROBE} of {name}", where)
            (axes[name],) = where_to
        return axes


def open_file(path: Path, threads: int) -> Any:
    """LiteRT's interpreter of a file. Raises ModelError where it, or the file, cannot be used."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise ModelError(
            f"ai-edge-litert cannot be used here: {error}",
            where=str(path),
            remedy='pip install "outrider[litert]", for 64-bit Linux on Arm and x86',
        ) from error
    try:
        return Interpreter(str(path), num_threads=threads)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"cannot be loaded: {reason}", where=str(path), remedy="export the model again") from error


def _signatures(interpreter: Any, where: str) -> tuple[Any, dict[int, Any]]:
    """The signature `decode`, and those for prefill by their rows. Raises ModelError for another form."""
    names = interpreter.get_signature_list()
    if "decode" not in names or not any(map(PREFILL.fullmatch, names)):
        raise _another_form(f"has the signatures {', '.join(sorted(names)) or 'none'}", where)
    runners = {name: interpreter.get_signature_runner(name) for name in names if PREFILL.fullmatch(name)}
    decode = interpreter.get_signature_runner("decode")
    caches = {name for name in decode.get_input_details() if name.startswith(CACHE)}
    if not caches or "logits" not in decode.get_output_details():
        raise _another_form("decode has no cache, or no logits", where)
    prefill = {}
    for name, runner in {"decode": decode, **runners}.items():
        inputs, outputs = runner.get_input_details(), set(runner.get_output_details())
        if odd := (inputs.keys() ^ caches) - FEEDS | {"tokens", "input_pos"} - inputs.keys():
            raise _another_form(f"{name} has or lacks the input {', '.join(sorted(odd))}", where)
        if lost := caches - outputs:
            raise _another_form(f"{name} does not give back {', '.join(sorted(lost))}", where)
        prefill[int(inputs["tokens"]["shape"][-1])] = runner
    if prefill.pop(1, None) is not decode or decode.get_input_details()["tokens"]["shape"].tolist() != [1, 1]:
        raise _another_form("decode takes other than one row", where)
    return decode, prefill


def _another_form(what: str, where: str) -> ModelError:
    return ModelError(
        what,
        where=where,
        remedy="Convert it with litert-torch, embedder inside and without a ring of slots: docs/litert.md",
    )


def _runs_on(interpreter: Any) -> str:
    """What most matrix products of the first signature went to; the others hold the same operators.

    An operator that a delegate took stays in the list, behind which each delegate stands as one more. What lies between
    a delegate's outputs and its inputs is what it took.
    """
    nodes = interpreter._get_ops_details()
    makers = {tensor: node for node in nodes if node["op_name"] != "DELEGATE" for tensor in node["outputs"].tolist()}
    taken: set[int] = set()
    for delegate in nodes:
        if delegate["op_name"] == "DELEGATE":
            given = set(delegate["inputs"].tolist())
            open_ = delegate["outputs"].tolist()
            while open_:
                tensor = open_.pop()
                if tensor not in given and tensor in makers and makers[tensor]["index"] not in taken:
                    taken.add(makers[tensor]["index"])
                    open_ += makers[tensor]["inputs"].tolist()
    products = [node["index"] for node in nodes if node["op_name"] in PRODUCTS]
    return "XNNPACK" if 2 * len(taken.intersection(products)) > len(products) else BUILT_IN
