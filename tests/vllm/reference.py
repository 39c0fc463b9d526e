"""vLLM's own plain decoding: its scheduler, its steps of one row, no drafts, no engine of ours. And the rule by which a
text of ours is compared with it where numerics are fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from cloud.engines.vllm.sampler import KEY, CoupledSampler
from protocol.sampling import Sampling, choose

CLOSE = 2e-3  # of logits, in float32


@dataclass
class Run:
    """A generated text, and the logits that each of its tokens was drawn from, by position."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)


class Plain:
    """vLLM with nothing of ours but the draws."""

    def __init__(self, target: Path, vocab: int, context: int) -> None:
        arguments = EngineArgs(
            model=str(target),
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=context,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            block_size=32,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
        )
        config = arguments.create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.own_sampler, self.vocab = self.runner.sampler, vocab
        self._count = 0

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling, new: int) -> list[Run]:
        """All prompts together, with coupled draws."""
        sampler = CoupledSampler(self.runner, self.vocab)
        runs = [Run(prompt) for prompt in prompts]
        names: dict[str, Run] = {}
        sampler.observe = lambda name, position, row: names[name].logits.__setitem__(position, row.clone())
        parameters = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args={KEY: sampling}
        )
        self._run(runs, parameters, names)
        return runs

    def decode_greedily(self, prompts: Sequence[list[int]], new: int) -> list[Run]:
        """All prompts together, with vLLM's own sampler."""
        self.runner.sampler = self.own_sampler
        runs = [Run(prompt) for prompt in prompts]
        parameters = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=list(range(self.vocab)),
        )
        self._run(runs, parameters, {})
        return runs

    def _run(self, runs: list[Run], parameters: SamplingParams, names: dict[str, Run]) -> None:
        for run in runs:
            self._count += 1
            names[f"plain{self._count}"] = run
            hasher = self.core.request_block_hasher
            # A salt of its own: nothing is taken from the prefix cache.
            self.core.add_request(
                Request(
                    f"plain{self._count}",
                    list(run.prompt),
                    parameters.clone(),
                    None,
                    cache_salt=str(self._count),
                    block_hasher=hasher,
                )
            )
        while self.core.scheduler.has_unfinished_requests():
            outputs, executed = self.core.step()
            self.core.post_step(executed)
            for output in outputs[0].outputs if outputs else ():
                names[output.request_id].ids += output.new_token_ids


def assert_agree(found: Run, expected: Run, sampling: Sampling) -> int | None:
    """The rule for fast numerics: every token is the one that its own logits and the noise give, logits of equal texts
    are close, and so texts part only where two candidates were closer than that.

    Returns the position where they part, None where they are equal. Of what follows nothing is asked but its own law.
    """
    start = len(found.prompt)
    assert found.prompt == expected.prompt
    for run in (found, expected):
        drawn = [choose(run.logits[start + i].float().numpy(), start + i, sampling) for i in range(len(run.ids))]
        assert run.ids == drawn
    for i, (a, b) in enumerate(zip(found.ids, expected.ids, strict=True)):
        off = float((found.logits[start + i] - expected.logits[start + i]).abs().max())
        assert off <= CLOSE, f"logits at position {start + i} are off by {off}"
        if a != b:
            print(f"position {start + i}: {a} and {b} change places where logits are off by {off:.1e}")
            return start + i
    return None
