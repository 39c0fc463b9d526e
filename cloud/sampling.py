"""Coupled sampling of many rows: one by one in NumPy on a CPU, at once in torch on a device with float64.

The torch part is the twin of protocol/sampling.py. Rows that top-k or top-p cuts are settled in rounds: each looks at
the best few tokens of the rows that are still open, the last at all of them. Rows that keep the whole vocabulary get
noise for all of it. On a CPU it does more work than NumPy does (greedy rows eight times as much, wide nuclei ten
times) and waits for its threads hundreds of times a batch, which stalls it wherever cores are shared. Two threads of
NumPy take turns more than they work: 40 rows took 21 ms, one after the other 13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from protocol.errors import SamplingError
from protocol.noise import GRID, KEY_STEPS, MASK, MULTIPLIERS, ROUNDS
from protocol.sampling import WEIGHT_ONE, Sampling, choose

PREFIXES = (128, 1024, 8192)  # how many of the best tokens a round looks at
CHUNK = {"cpu": 1 << 18}  # float64 elements at once that stay in a core's cache
CHUNK_ELSEWHERE = 1 << 24


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10 on 32-bit words held in int64 tensors that broadcast together.

    A product of two words can exceed int64; it wraps, which keeps all 64 bits, and the masks drop the sign.
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        k0, k1 = ((word + i * step) & MASK for word, step in zip(key, KEY_STEPS, strict=True))
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & MASK ^ (c1 ^ k0), p1 & MASK
        c2, c3 = (p0 >> 32) & MASK ^ (c3 ^ k1), p0 & MASK
    return [c0, c1, c2, c3]


def words(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each block: int64 tensors that broadcast to [...] -> [..., 4].

    seeds and positions hold unsigned 64-bit numbers in two's complement.
    """
    counter = (blocks, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(positions))
    drawn = philox(counter, (seeds & MASK, (seeds >> 32) & MASK))
    return torch.stack(torch.broadcast_tensors(*drawn), dim=-1)


def gumbel_of(word: Tensor) -> Tensor:
    """Gumbel(0, 1) numbers on the grid, float64, for 32-bit words in an int64 tensor of any shape."""
    uniform = word.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().mul_(-GRID).round_().div_(GRID)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise of each token id: int64 tensors that broadcast to the shape of ids -> float64 of that shape."""
    lanes = (ids & 3).unsqueeze(-1)
    return gumbel_of(words(seeds, positions, ids >> 2).gather(-1, lanes).squeeze(-1))


def choose_rows(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """The token that each row of logits [rows, vocab] (any float type, any device) draws at its position.

    Equal to `protocol.sampling.choose` of every row's float32 values. Raises SamplingError, naming the row, where a row
    holds NaN or plus infinity, or nothing above minus infinity.
    """
    if logits.device.type != "cpu":
        return choose_at_once(logits, positions, samplings)
    rows = logits.float().numpy()

    def draw(row: int) -> int:
        try:
            return choose(rows[row], positions[row], samplings[row])
        except SamplingError as error:
            raise SamplingError(error.what, where=f"row {row}", remedy=error.remedy) from error

    return [draw(row) for row in range(len(samplings))]


def choose_at_once(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """What `choose_rows` gives, by torch alone."""
    if not samplings:
        return []
    rows = _Rows.of(logits.float(), positions, samplings)
    chosen = [0] * len(samplings)
    greedy = [i for i, sampling in enumerate(samplings) if sampling.greedy]
    whole = [i for i, s in enumerate(samplings) if not s.greedy and not s.top_k and s.top_p == 1.0]
    cut = [i for i, s in enumerate(samplings) if not s.greedy and (s.top_k or s.top_p < 1.0)]
    for part, draw in ((greedy, _greedy), (whole, _whole), (cut, _cut)):
        if part:
            for i, token in zip(part, draw(rows.pick(part)).tolist(), strict=True):
                chosen[i] = token
    return chosen


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of logits with what each is drawn by; all but logits are columns."""

    logits: Tensor  # [rows, vocab] float32
    peak: Tensor  # [rows, 1] float64, the greatest logit over the temperature
    temperature: Tensor  # [rows, 1] float64, 1 where it is 0
    top_k: Tensor  # [rows, 1] int64
    top_p: Tensor  # [rows, 1] float64
    seed: Tensor  # [rows, 1] int64, two's complement
    position: Tensor  # [rows, 1] int64, two's complement

    @classmethod
    def of(cls, logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> _Rows:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(logits.device).unsqueeze(1)

        temperature = column([s.temperature or 1.0 for s in samplings], torch.float64)
        peak = logits.amax(1, keepdim=True).double() / temperature  # a maximum keeps NaN
        if not bool(peak.isfinite().all()):
            row = int(peak.isfinite().squeeze(1).long().argmin())
            raise SamplingError(
                f"the greatest of {logits.shape[1]} logits over the temperature is {float(peak[row])}",
                where=f"row {row}",
                remedy="The model's weights or numerics are broken, or the temperature is far too small",
            )
        return cls(
            logits,
            peak,
            temperature,
            column([s.top_k for s in samplings], torch.int64),
            column([s.top_p for s in samplings], torch.float64),
            column([_signed(s.seed) for s in samplings], torch.int64),
            column([_signed(position) for position in positions], torch.int64),
        )

    def pick(self, index: Sequence[int]) -> _Rows:
        if len(index) == self.logits.shape[0]:
            return self
        at = torch.tensor(index, device=self.logits.device)
        return _Rows(*(getattr(self, field.name)[at] for field in fields(self)))

    def chunks(self) -> Iterator[_Rows]:
        """Groups of rows small enough that float64 work on their whole vocabulary stays cheap."""
        rows, vocab = self.logits.shape
        size = max(1, CHUNK.get(self.logits.device.type, CHUNK_ELSEWHERE) // vocab)
        for start in range(0, rows, size):
            yield _Rows(*(getattr(self, field.name)[start : start + size] for field in fields(self)))

    def weights(self, logits: Tensor) -> Tensor:
        """Top-p's weights of logits [rows, m]: integers, in float64, whose sums are exact below 2^21 tokens."""
        return logits.double().div_(self.temperature).sub_(self.peak).exp_().mul_(WEIGHT_ONE).round_()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _greedy(rows: _Rows) -> Tensor:
    return rows.logits.argmax(1)  # the first of equals


def _whole(rows: _Rows) -> Tensor:
    """Draw with noise for the whole vocabulary -> ids [rows]."""
    vocab = rows.logits.shape[1]
    blocks = torch.arange((vocab + 3) // 4, device=rows.logits.device)
    drawn = []
    for part in rows.chunks():
        noise = gumbel_of(words(part.seed, part.position, blocks).flatten(1)[:, :vocab])
        drawn.append(noise.add_(part.logits.double().div_(part.temperature)).argmax(1))
    return torch.cat(drawn)


def _cut(rows: _Rows) -> Tensor:
    """Draw from what top-k and top-p leave -> ids [rows]."""
    count, vocab = rows.logits.shape
    total = torch.zeros_like(rows.peak)  # [rows, 1]; top-p over a top-k needs no other sum than that of its own ids
    if not bool(rows.top_k.all()):
        total = torch.cat([part.weights(part.logits).sum(1, keepdim=True) for part in rows.chunks()])
    drawn = torch.zeros(count, dtype=torch.int64, device=rows.logits.device)
    still_open = list(range(count))
    for size in (*PREFIXES, vocab):
        winners, settled = _cut_within(rows.pick(still_open), total[still_open], min(size, vocab))
        drawn[still_open] = winners  # those of rows that stay open are overwritten later
        still_open = [row for row, done in zip(still_open, settled.tolist(), strict=True) if not done]
        if not still_open:
            break
    return drawn


def _cut_within(rows: _Rows, total: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Draw from the best `size` tokens: ids [rows], and whether all that top-k and top-p leave is among them [rows]."""
    values, ids, known = _leading(rows.logits, size)
    limited = rows.top_k > 0
    closed = (known.sum(1, keepdim=True) >= rows.top_k) & limited | (size == rows.logits.shape[1])  # [rows, 1]
    rank = torch.arange(size, device=ids.device)
    kept = known & (values > -math.inf) & (~limited | (rank < rows.top_k))  # [rows, size]
    weights = rows.weights(values) * kept
    before = weights.cumsum(1) - weights
    share = rows.top_p * torch.where(limited, weights.sum(1, keepdim=True), total)
    inside = (before < share) | (rows.top_p == 1.0)
    closed |= (kept & ~inside).any(1, keepdim=True) & ~limited
    scores = values.double().div_(rows.temperature).add_(gumbel(rows.seed, rows.position, ids))
    scores.masked_fill_(~(kept & inside), -math.inf)
    best = scores == scores.amax(1, keepdim=True)
    return ids.where(best, rows.logits.shape[1]).amin(1), closed.squeeze(1)


def _leading(logits: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best `size` of logits [rows, vocab], greatest first, equals by id: values, ids, known, all [rows, size].

    known: whether the place is sure. Those that equal the last one are not: others like them may have been left out.
    """
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids, torch.ones_like(ids, dtype=torch.bool)
    values, ids = logits.topk(size, dim=1, sorted=False)
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value), values > values[:, -1:]
