"""The ONNX Runtime drafter: a 4-bit model that evaluates rows of a tree against one key-value cache, in place.

The text's tokens lie in the cache's slots 0 .. L-1 and the rows of the tree behind them in the order they were
evaluated, so a parent always lies before its children. A row's attention bias lets it see the text, its ancestors and
itself; its position counts its ancestors only. GroupQueryAttention on the CPU writes new rows into the cache it reads
when past and present are bound to one address, so a pass never copies the past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edge.drafters import manifest
from edge.drafters.base import Candidate, DrafterInfo
from edge.memory import untouched
from protocol.errors import ModelError
from protocol.sampling import Sampling, rank

PREFILL_ROWS = 64  # per pass: larger chunks are not faster a token, and let nothing else run for longer
DEFAULT_CONTEXT = 4096  # tokens; a cache for all that a model could take may not fit on a board
HIDDEN = -1e9  # added to a score before softmax: its exponential is 0 in float32
FORGOTTEN = -1

# Providers that work in the host's memory, where the cache lies.
HOST_PROVIDERS = ("CPUExecutionProvider", "XnnpackExecutionProvider", "ACLExecutionProvider", "DnnlExecutionProvider")


@dataclass(slots=True, eq=False)
class Row:
    """One evaluated token. slot: where its keys and values lie, or FORGOTTEN;
    evaluation, index: which row of which pass it was."""

    id: int
    position: int
    slot: int
    parent: Row | None
    evaluation: int
    index: int


class OnnxDrafter:
    """A `Drafter` for a directory that `python -m tools.export drafter` wrote. Used by one thread at a time."""

    info: DrafterInfo

    @classmethod
    def load(
        cls,
        directory: str | Path,
        threads: int = 1,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        context: int | None = None,
        *,
        verify: bool = False,
        spin: bool = False,
    ) -> OnnxDrafter:
        """Load a model directory.

        context: tokens that the cache holds, at most the model's own; by default 4096 or what the model takes.
        verify: check the weights against the manifest's digest, which reads them once more.
        spin: let the threads wait for work by spinning: a little faster, but it burns the board's cores.
        Raises ModelError for a file that is missing, corrupt or not the manifest's, or a provider that is not there.
        """
        directory = Path(directory)
        facts = manifest.read(directory, "drafter", verify=verify)
        session = _session(directory / "model.onnx", threads, providers, spin)
        capacity = min(context or DEFAULT_CONTEXT, facts.context)
        try:
            return cls(session, facts, capacity)
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"not a graph of this drafter: {error}",
                where=str(directory / "model.onnx"),
                remedy="export the model again",
            ) from error

    def __init__(self, session: ort.InferenceSession, facts: manifest.Manifest, capacity: int) -> None:
        self.info = DrafterInfo(
            name=facts.name,
            vocab_size=facts.vocab_size,
            context=capacity,
            tokenizer_digest=facts.tokenizer_digest,
            weights_digest=facts.weights_digest,
            compute=facts.compute,
            provider=_runs_on(session),
        )
        self._pass = _Pass(session, capacity)
        self._text: list[int] = []
        self._last: Row | None = None
        self._tree: list[Row] = []  # in slot order, which is the order of evaluation
        self._used = 0  # slots
        self._evaluation = 0
        self._logits = np.empty((0, 0), np.float32)  # [rows of the latest pass, width]

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Row:
        """Make `ids` the text. See `Drafter.prefill`."""
        if not ids:
            raise ModelError("an empty text cannot be evaluated", where=self.info.name, remedy="give a prompt")
        self._check_room(len(ids))
        self._check_ids(ids)
        self._keep_common(ids)
        done = min(_common(self._text, ids), len(ids) - 1)  # the last token is evaluated anew, for its logits
        self._forget()
        self._evaluation += 1
        self._text = list(ids[:done])  # grows with each chunk, so that it is true after an error too
        while done < len(ids):
            end = min(done + PREFILL_ROWS, len(ids))
            bias = self._pass.bias(end - done, end)
            bias[:] = 0  # the kernel's own causal mask is all that a text needs
            wanted = [end - done - 1] if end == len(ids) else []
            self._logits = self._pass.run(ids[done:end], range(done, end), end, wanted)
            self._text += ids[done:end]
            self._used = done = end
            if progress:
                progress(done, len(ids))
        self._last = Row(ids[-1], len(ids) - 1, len(ids) - 1, None, self._evaluation, 0)
        return self._last

    def extend(self, rows: Sequence[tuple[int, Row | int]]) -> list[Row]:
        """Evaluate rows of the tree in one pass. See `Drafter.extend`."""
        if not rows:
            return []
        self._check_room(self._used + len(rows))
        self._check_ids([id for id, _ in rows])
        new: list[Row] = []
        for index, (id, parent) in enumerate(rows):
            above = new[parent] if isinstance(parent, int) else parent
            if above.slot == FORGOTTEN:
                raise ValueError(f"the parent of row {index} is no longer in the tree")
            new.append(Row(id, above.position + 1, self._used + index, above, self._evaluation + 1, index))
        total, length = self._used + len(new), len(self._text)
        bias = self._pass.bias(len(new), total)
        bias[:, :length] = 0
        bias[:, length:] = HIDDEN
        for row in new:
            bias[row.index, [above.slot for above in self._branch(row)]] = 0
        ids, positions = [row.id for row in new], [row.position for row in new]
        self._logits = self._pass.run(ids, positions, total, range(len(new)))
        self._tree += new
        self._used = total
        self._evaluation += 1
        return new

    def keep(self, path: Sequence[Row]) -> None:
        """Append rows of the tree to the text. See `Drafter.keep`."""
        if not path:
            return
        broken = path[0].slot == FORGOTTEN or path[0].parent is not self._last
        if broken or any(b.parent is not a for a, b in pairwise(path)):
            raise ValueError("the path does not follow the text's last row")
        last = path[-1]
        living = {id(last)}
        survivors = []
        for row in self._tree:
            if id(row.parent) in living:
                living.add(id(row))
                survivors.append(row)
        moved = [*path, *survivors]
        first = len(self._text)
        self._pass.move([row.slot for row in moved], first)
        self._forget()
        for slot, row in enumerate(moved, first):
            row.slot = slot
        for row in path[:-1]:
            row.slot = FORGOTTEN
        last.parent = None  # the text has no need of its rows, and the last one must not hold them all
        self._text += [row.id for row in path]
        self._last, self._tree = last, survivors
        self._used = first + len(moved)

    def candidates(self, row: Row, sampling: Sampling, n: int) -> list[Candidate]:
        """The n likeliest guesses behind `row`. See `Drafter.candidates`."""
        ids, probabilities = rank(self.logits(row), row.position + 1, sampling, n)
        return [Candidate(int(id), float(p)) for id, p in zip(ids, probabilities, strict=True)]

    def logits(self, row: Row) -> np.ndarray:
        """What the candidates behind `row` are ranked by: float32 [vocab], a view that the next pass overwrites."""
        if row.evaluation != self._evaluation:
            raise ValueError("only the rows of the latest pass can be asked for candidates or logits")
        return self._logits[row.index, : self.info.vocab_size]

    def room(self) -> int:
        return self.info.context - self._used

    def _keep_common(self, ids: Sequence[int]) -> None:
        """Where `ids` goes on beyond the text along rows of the tree, keep those."""
        if self._last is None or len(ids) <= len(self._text) or list(ids[: len(self._text)]) != self._text:
            return
        path: list[Row] = []
        above = self._last
        for id in ids[len(self._text) :]:
            child = next((row for row in self._tree if row.parent is above and row.id == id), None)
            if child is None:
                break
            path.append(child)
            above = child
        self.keep(path)

    def _forget(self) -> None:
        """Mark the text's last row and the whole tree as gone, so that a caller who kept one is told."""
        for row in self._tree if self._last is None else [self._last, *self._tree]:
            row.slot = FORGOTTEN
        self._last, self._tree = None, []

    def _branch(self, row: Row) -> list[Row]:
        """The row and its ancestors in the tree."""
        branch = [row]
        while (above := branch[-1].parent) is not None and above is not self._last:
            branch.append(above)
        return branch

    def _check_room(self, total: int) -> None:
        if total > self.info.context:
            raise ModelError(
                f"{total} tokens do not fit the context of {self.info.context}",
                where=self.info.name,
                remedy="shorten the prompt, or load the drafter with a larger context",
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= id < self.info.vocab_size for id in ids):
            bad = next(id for id in ids if not 0 <= id < self.info.vocab_size)
            raise ModelError(
                f"id {bad} is not in the vocabulary of {self.info.vocab_size}",
                where=self.info.name,
                remedy="use the tokenizer.json of this drafter",
            )


class _Pass:
    """The session with its buffers bound: the cache once, what changes with each pass by address."""

    def __init__(self, session: ort.InferenceSession, capacity: int) -> None:
        self._session = session
        self._binding = session.io_binding()
        shapes = {value.name: value.shape for value in session.get_inputs()}
        layers = sum(name.startswith("past.") and name.endswith(".key") for name in shapes)
        _, heads, _, width = shapes["past.0.key"]
        self._vocab = session.get_outputs()[0].shape[1]
        shape = (layers, 2, 1, heads, capacity, width)
        # Untouched pages cost no memory, so the capacity is paid for only as the text grows.
        self._cache = np.frombuffer(untouched(4 * prod(shape)), np.float32).reshape(shape)
        for layer in range(layers):
            for side, name in enumerate(("key", "value")):
                buffer = self._cache[layer, side]  # [1, kv_heads, capacity, head_dim]
                self._bind(self._binding.bind_input, f"past.{layer}.{name}", buffer)
                self._bind(self._binding.bind_output, f"present.{layer}.{name}", buffer)
        self._bias = np.empty(0, np.float32)
        self._logits = np.empty((0, self._vocab), np.float32)

    def bias(self, rows: int, total: int) -> np.ndarray:
        """The attention bias of the next pass, to be filled: [rows, total]."""
        if self._bias.size < rows * total:
            self._bias = np.empty(rows * total, np.float32)
        self._rows = self._bias[: rows * total].reshape(1, 1, rows, total)
        return self._rows[0, 0]

    def run(self, ids: Sequence[int], positions: Sequence[int], total: int, wanted: Sequence[int]) -> np.ndarray:
        """Evaluate rows into the last slots below `total` under the bias just filled: logits [wanted, width]."""
        if len(wanted) > len(self._logits):
            self._logits = np.empty((len(wanted), self._vocab), np.float32)
        logits = self._logits[: len(wanted)]
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.array([ids], np.int64),
            "position_ids": np.array([positions], np.int64),
            "attention_bias": self._rows,
            "seqlens_k": np.array([total - 1], np.int32),
            "total_length": np.array(total, np.int32),
            "logit_rows": np.array(wanted, np.int64),
        }
        for name, array in feeds.items():
            self._bind(self._binding.bind_input, name, array)
        self._bind(self._binding.bind_output, "logits", logits)
        self._session.run_with_iobinding(self._binding)
        return logits

    def move(self, slots: Sequence[int], first: int) -> None:
        """Bring the rows at `slots` (ascending) to first, first + 1, …; those that already lie there stay."""
        still = next((i for i, slot in enumerate(slots) if slot != first + i), len(slots))
        if old := list(slots[still:]):
            start = first + still
            self._cache[..., start : start + len(old), :] = self._cache[..., old, :]

    def _bind(self, bind: Callable[..., Any], name: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _session(path: Path, threads: int, providers: Sequence[str], spin: bool) -> ort.InferenceSession:
    available = [name for name in ort.get_available_providers() if name in HOST_PROVIDERS]
    if unknown := [name for name in providers if name not in available]:
        raise ModelError(
            f"execution provider {unknown[0]!r} is not usable here",
            where=str(path),
            remedy=f"choose from: {', '.join(available)}",
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # ONNX Runtime's exceptions share no base below Exception
        reason = str(error).splitlines()[0]
        raise ModelError(f"cannot be loaded: {reason}", where=str(path), remedy="export the model again") from error


def _runs_on(session: ort.InferenceSession) -> str:
    """The provider that most of the graph went to: one that was asked for first may have taken nothing of it."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # an older ONNX Runtime does not tell
        return session.get_providers()[0]
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[part.ep_name] += len(part.get_nodes())
    return nodes.most_common(1)[0][0]
