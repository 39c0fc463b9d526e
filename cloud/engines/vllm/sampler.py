"""The target's draws inside vLLM: docs/sampling.md instead of vLLM's own sampler and its rejection sampler.

vLLM takes every request for a greedy one, so it never touches the logits. Both of its samplers are replaced on the
model runner: for each row the token that `choose_rows` draws at the row's position, then acceptance by equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from cloud.sampling import choose_rows
from protocol.errors import SamplingError
from protocol.sampling import Sampling

KEY = "outrider_sampling"  # in the extra_args of a request's SamplingParams
NOTHING = -1  # vLLM leaves out ids like this one

Observe = Callable[[str, int, Tensor], None]
"""(request id, position, logits [vocab]) of each row that a token is drawn from."""


class CoupledSampler:
    """Stands in for the samplers of `runner`, vLLM's model runner. vocab_size: ids that the tokenizer has.

    A request whose logits allow no draw gets no token at all. observe: called with each row, where it is set.
    """

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self.observe: Observe | None = None
        self._runner, self._vocab_size = runner, vocab_size
        runner.sampler, runner.rejection_sampler = self.plain, self.drafted

    def plain(self, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        """Of a step without drafts: logits [requests, vocab]."""
        return self._sample(logits, [[] for _ in range(logits.shape[0])])

    def drafted(self, metadata: Any, draft_probs: None, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        """Of a step with drafts: logits [root and draft rows, vocab], request by request, the root row first."""
        ids = iter(metadata.draft_token_ids.tolist())
        return self._sample(logits, [[next(ids) for _ in range(num)] for num in metadata.num_draft_tokens])

    def _sample(self, logits: Tensor, drafts: Sequence[list[int]]) -> SamplerOutput:
        """ids [requests, longest draft + 1], NOTHING where there is none."""
        runner = self._runner
        # At least two columns: only in a matrix does vLLM look for ids to leave out.
        sampled = torch.full((len(drafts), max(2, 1 + max(map(len, drafts)))), NOTHING, dtype=torch.int32)
        roots: list[tuple[int, int]] = []  # (request's index, its first row)
        rows: list[int] = []
        positions: list[int] = []
        samplings: list[Sampling] = []
        start = 0
        for i, (name, draft) in enumerate(zip(runner.input_batch.req_ids, drafts, strict=True)):
            num = 1 + len(draft)
            if not runner.discard_request_mask.np[i]:  # of a chunk that does not reach the end of its text
                state = runner.requests[name]
                roots.append((i, len(rows)))
                rows += range(start, start + num)
                positions += range(state.num_tokens, state.num_tokens + num)
                samplings += [state.sampling_params.extra_args[KEY]] * num
                if self.observe is not None:
                    for row in range(num):
                        self.observe(name, state.num_tokens + row, logits[start + row, : self._vocab_size])
            start += num
        if rows:
            kept = logits if len(rows) == logits.shape[0] else logits[rows]
            drawn = draw(kept[:, : self._vocab_size], positions, samplings)
            for i, first in roots:
                accepted = certify(drawn[first : first + 1 + len(drafts[i])], drafts[i])
                sampled[i, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=sampled.to(logits.device), logprobs_tensors=None)


def draw(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int | None]:
    """The token of each row of logits [rows, vocab], None where the row allows none."""
    try:
        return list(choose_rows(logits, positions, samplings))
    except SamplingError:
        if len(positions) == 1:
            return [None]
        return [
            token
            for row in range(len(positions))
            for token in draw(logits[row : row + 1], positions[row : row + 1], samplings[row : row + 1])
        ]


def certify(drawn: Sequence[int | None], draft: Sequence[int]) -> list[int]:
    """The ids now appended to a text: accepted ones of a chain, and the one drawn behind the last of them.

    Empty where a row that the walk comes to allowed no draw.
    """
    ids: list[int] = []
    for token, guess in zip(drawn, [*draft, NOTHING], strict=True):
        if token is None:
            return []
        ids.append(token)
        if token != guess:
            break
    return ids
