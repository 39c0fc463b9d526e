"""`outrider-edge check`: each thing that a board needs, looked at in the order in which it would fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge.board import Board
from edge.config import EdgeConfig
from edge.drafters.onnx import OnnxDrafter
from edge.loading import load_drafter, load_text
from link.config import load
from protocol.errors import OutriderError
from protocol.sampling import Sampling


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. exit_code: what the command ends with if this is the first that failed."""

    name: str
    ok: bool
    detail: str
    exit_code: int = 0


def run_checks(config_path: Path, wait_s: float) -> list[Finding]:
    """Findings up to and including the first failure that makes the next ones pointless."""
    findings: list[Finding] = []

    def look(name: str, work: Callable[[], str]) -> bool:
        try:
            findings.append(Finding(name, True, work()))
        except OutriderError as error:
            findings.append(Finding(name, False, str(error), error.exit_code))
        return findings[-1].ok

    found: dict[str, object] = {}

    def configuration() -> str:
        found["config"] = load(config_path, EdgeConfig)
        return str(config_path)

    def model() -> str:
        found["drafter"] = load_drafter(found["config"])  # type: ignore[arg-type]
        info = found["drafter"].info  # type: ignore[attr-defined]
        return f"{info.name}, {info.compute} on {info.provider}, {info.vocab_size} ids, context {info.context}"

    def drafting() -> str:
        text = load_text(found["config"])  # type: ignore[arg-type]
        drafter: OnnxDrafter = found["drafter"]  # type: ignore[assignment]
        row = drafter.prefill(text.chat([{"role": "user", "content": "Say hello."}]))
        (guess,) = drafter.candidates(row, Sampling(), 1)
        return f"first guess {text.decode([guess.id])!r} with probability {guess.probability:.2f}"

    if not (look("configuration", configuration) and look("drafter", model) and look("drafting", drafting)):
        return findings
    config: EdgeConfig = found["config"]  # type: ignore[assignment]
    drafter: OnnxDrafter = found["drafter"]  # type: ignore[assignment]
    board = Board(
        config, drafter, client_id=f"outrider-{config.device.name}-check-{secrets.token_hex(3)}", present=False
    )

    def broker() -> str:
        board.link.wait_up(wait_s)
        return config.broker.address

    def verifier() -> str:
        state = board.find_target(wait_s)
        return f"{state.target} on {state.verifier}, step {state.step_us / 1000:.1f} ms, {state.numerics}"

    board.start()
    try:
        if look("broker", broker):
            look("verifier", verifier)
    finally:
        board.close()
    return findings
