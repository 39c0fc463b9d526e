"""What drafts from outside cost inside vLLM: our step beside vLLM's own speculative step of as many rows, and its plain
ones. `tools/bench/vllm_steps.py` is the part that runs where vLLM is.
"""

from __future__ import annotations

import json
import os
import subprocess

from protocol.errors import ModelError
from tools.bench.engine import passages
from tools.models import ROOT, prepare
from tools.vllm import ABSENT, python

SESSIONS, DRAFT = 8, 4
CONTEXT = 128  # tokens before the first step
BAR = 1.3


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Median milliseconds of a step, rivals in turns, and the ratio that `BAR` is for. SmolLM2-135M, float32."""
    interpreter = python()
    if interpreter is None:
        return {"skipped": ABSENT}
    _, target = prepare("smollm2")
    asked = {
        "target": str(target),
        "texts": passages(target, SESSIONS * (1 + DRAFT), CONTEXT),
        "sessions": SESSIONS,
        "draft": DRAFT,
        "threads": threads,
        "rounds": 6 if quick else 30,
    }
    done = subprocess.run(
        [interpreter, "-m", "tools.bench.vllm_steps"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        check=False,
    )
    if done.returncode:
        raise ModelError(
            f"it ended with {done.returncode}", where="tools.bench.vllm_steps", remedy="See its words above"
        )
    found = json.loads(done.stdout)
    ms = found["ms"]
    rows = SESSIONS * (1 + DRAFT)
    ours, theirs = ms[f"ours, {rows} rows"], ms[f"vLLM n-gram, {rows} rows"]
    return {
        "model": "smollm2-135m-instruct",
        "dtype": "float32",
        "threads": threads,
        **found,
        "over_vllm_speculation": round(ours / theirs, 3),
        "bar": BAR,
    }
