"""The large model alone, asked for the texts that a fleet wrote."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge.text import Text
from protocol.errors import OutriderError
from protocol.sampling import Sampling
from tools.stage import spawn


def texts_alone(
    target: Path, text: Text, prompts: Sequence[str], numerics: str, sampling: Sampling, max_tokens: int
) -> list[list[int]]:
    """What the target writes for each prompt, with seeds from 1 on, in a process that shares no session code with the
    fleet. Raises OutriderError when that fails.
    """
    lines = [
        {
            "prompt": text.chat([{"role": "user", "content": prompt}]),
            "sampling": msgspec.to_builtins(msgspec.structs.replace(sampling, seed=seed)),
            "max_tokens": max_tokens,
            "stop_ids": sorted(text.stop_ids),
        }
        for seed, prompt in enumerate(prompts, start=1)
    ]
    arguments = ["-m", "tools.demo.reference", "--target", str(target), "--numerics", numerics]
    alone = spawn(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = alone.communicate("".join(json.dumps(line) + "\n" for line in lines))
    if alone.returncode:
        raise OutriderError("the target alone could not be computed", where="tools.demo.reference")
    return [json.loads(line) for line in out.splitlines()]
