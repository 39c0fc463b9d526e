"""Where the interpreter is that has vLLM, which pins its own torch and transformers and so lives apart."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "OUTRIDER_VLLM_PYTHON"
REPOSITORY = Path(__file__).parents[1]
ABSENT = f"vLLM is not here: `make .venv-vllm/.ready`, or name an interpreter that has it in {VARIABLE}"


def python() -> Path | None:
    """The interpreter that has vLLM, or None where there is none: that of OUTRIDER_VLLM_PYTHON, else .venv-vllm's."""
    found = Path(os.environ.get(VARIABLE) or REPOSITORY / ".venv-vllm" / "bin" / "python")
    return found if found.is_file() else None
