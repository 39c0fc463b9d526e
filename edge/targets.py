"""Which target a board's sessions go to: the one that is configured, or the only one that reads its tokens."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.errors import ConfigError, LinkError, ModelError
from protocol.messages import VerifierState


def choose_target(
    states: Iterable[VerifierState], *, tokenizer_digest: str, wanted: str | None, where: str
) -> VerifierState:
    """The state of a verifier that is up and serves the target to use. where: the broker, for messages.

    Raises LinkError where no verifier is up, ModelError where the tokenizers differ, ConfigError where several targets
    fit and none is named.
    """
    up = [state for state in states if state.status == "up" and state.target != "none"]
    if wanted is not None:
        up = [state for state in up if state.target == wanted]
        if not up:
            raise LinkError(
                f"no verifier of target {wanted} is up",
                where=where,
                remedy="Start one with `outrider-cloud serve`, or see `outrider-cloud status`",
            )
    if not up:
        raise LinkError("no verifier is up", where=where, remedy="Start one with `outrider-cloud serve`")
    fitting = [state for state in up if state.tokenizer_digest == tokenizer_digest]
    if not fitting:
        other = up[0]
        raise ModelError(
            f"the drafter's tokenizer {tokenizer_digest[:12]} is not the target's {other.tokenizer_digest[:12]}"
            f" ({other.target})",
            where=where,
            remedy="Export a drafter of the target's own family",
        )
    ids = sorted({state.target for state in fitting})
    if len(ids) > 1:
        raise ConfigError(
            f"several targets fit this drafter: {', '.join(ids)}",
            where=where,
            remedy="Name one as `target` in [session]",
        )
    return fitting[0]
