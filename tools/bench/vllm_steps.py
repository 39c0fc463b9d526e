"""Steps of vLLM with and without our scheduler and draws, timed in turns in one process: see `verifier_vllm.py`, which
asks in JSON on stdin and is answered on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloud.engines.vllm  # noqa: F401  (sets what vLLM reads when it is imported)
from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from protocol.sampling import Sampling
from tools.bench.record import ms, round_robin

LENGTH = 1024
ROWS = 512
WARM = 3
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


class Vllm:
    """vLLM as it comes. speculative: its own configuration for drafts."""

    def __init__(self, target: str, prompts: Sequence[list[int]], speculative: dict[str, Any] | None) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor
        from vllm.v1.request import Request

        config = EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=LENGTH,
            max_num_seqs=64,
            max_num_batched_tokens=ROWS,
            block_size=32,
            kv_cache_memory_bytes=1 << 30,
            enforce_eager=True,
            speculative_config=speculative,
        ).create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        parameters = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            self.core.add_request(
                Request(str(i), prompt, parameters, None, block_hasher=self.core.request_block_hasher)
            )
        scheduler = self.core.scheduler
        while any(request.num_computed_tokens < len(prompts[0]) for request in scheduler.requests.values()):
            self.step()

    def step(self) -> int:
        """Rows of the step."""
        rows = sum(1 + len(request.spec_token_ids) for request in self.core.scheduler.requests.values())
        _, executed = self.core.step()
        self.core.post_step(executed)
        return rows


def lookup(text: list[int], most: int) -> list[int]:
    """What followed when the last two ids, or else the last one, were seen before: vLLM's n-gram guess."""
    for n in (2, 1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return (text[start + n :] + [0] * most)[:most]
    return [0] * most


def ours(asked: dict[str, Any], prompts: Sequence[list[int]]) -> dict[str, Callable[[], object]]:
    """Steps of our engine: every session with a draft, and plainly."""
    from cloud.engines.vllm.load import Options, load

    sessions, most = asked["sessions"], asked["draft"]
    engine = load(
        asked["target"],
        Numerics(dtype="float32"),
        Options(kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=ROWS, max_model_len=LENGTH, enforce_eager=True),
        max_draft=most,
        threads=asked["threads"],
    )

    def rival(first: int, sampling: Sampling, most: int) -> Callable[[], object]:
        texts = {first + i: list(prompt) for i, prompt in enumerate(prompts[:sessions])}

        def step() -> None:
            work = []
            for key, text in texts.items():
                draft = lookup(text, most)
                left = engine.pending(key)
                work.append(Work(key, left, draft, range(-1, most - 1)) if left == 1 else Work(key, left))
            for key, ids in engine.step(Plan(work)).accepted.items():
                texts[key] += ids

        for key, text in texts.items():
            engine.open(key, text, sampling, LENGTH - 64, str(first))
            text += engine.step(Plan([Work(key, len(text))])).accepted[key]
        return step

    rows = sessions * (1 + most)
    return {
        f"ours, {rows} rows": rival(0, Sampling(), most),
        f"ours, {rows} rows, T 0.8, top-p 0.95": rival(100, SAMPLED, most),
        f"ours, {sessions} rows": rival(200, Sampling(), 0),
    }


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not the answer
    asked = json.load(sys.stdin)
    target, texts, sessions, draft = asked["target"], asked["texts"], asked["sessions"], asked["draft"]
    rows = sessions * (1 + draft)
    # Texts that say everything twice, so that there is always a guess.
    half = len(texts[0]) // 2
    prompts = [text[:half] * 2 for text in texts]
    rivals = ours(asked, prompts)
    for count in (sessions, rows):
        rivals[f"vLLM plain, {count} rows"] = Vllm(target, prompts[:count], None).step
    # Last, as vLLM's start on a CPU stumbles over numba.
    ngram = {"method": "ngram", "num_speculative_tokens": draft, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    speculating = Vllm(target, prompts[:sessions], ngram)
    seen: list[int] = []
    rivals[f"vLLM n-gram, {rows} rows"] = lambda: seen.append(speculating.step())
    times = round_robin(rivals, rounds=asked["rounds"], warm=WARM)
    seen = seen[WARM:]
    found = {"ms": {name: ms(taken) for name, taken in times.items()}, "rows_of_ngram": sum(seen) / len(seen)}
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main()
