"""vLLM's own greedy decoding, for a benchmark beside it: run by the interpreter that has vLLM.

The first argument is a JSON object: model, prompts ([n] lists of ids), tokens, eager. Each line on stdin asks for one
run; the answer is a JSON line: seconds from the last session's first token to all sessions' last, and ids by session.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.argv[1])
    prompts, tokens = asked["prompts"], asked["tokens"]
    engine = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=asked["eager"],
        max_model_len=1024,
        max_num_seqs=len(prompts),
        kv_cache_memory_bytes=1 << 30,
    ).llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True, detokenize=False)
    print(json.dumps("ready"), file=answers)
    for turn, _ in enumerate(sys.stdin):
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{i}", {"prompt_token_ids": prompt}, params)
        ids: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
        before, started = 0, 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
            if not started and all(ids.values()):
                before, started = sum(map(len, ids.values())), time.perf_counter()
        seconds = time.perf_counter() - started
        made = sum(map(len, ids.values())) - before
        print(json.dumps({"tokens_per_s": made / seconds, "ids": list(ids.values())}), file=answers)


if __name__ == "__main__":
    main()
