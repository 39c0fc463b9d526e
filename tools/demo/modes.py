"""The ways to get a text over the link that the demo compares."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

from edge.config import DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig, SessionConfig
from link.config import BrokerConfig

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that checks whether a string is a palindrome, and explain it.",
    "List five things that a small computer at home can be used for.",
)


@dataclass(frozen=True, slots=True)
class Mode:
    """A drafting policy and the patience that belongs to it."""

    title: str
    policy: str
    patience_s: float


MODES = {
    "cloud": Mode("cloud alone", "none", 0.0),
    "sync": Mode("synchronous, 4 drafts", "sync", inf),
    "async": Mode("verifier waits", "chain", inf),
    "never_wait": Mode("never waits", "chain", 0.0),
    "tree": Mode("tree, never waits", "tree", 0.0),
}


def board_config(
    mode: str, *, port: int, drafter: Path, state: Path, max_tokens: int, threads: int, temperature: float, top_p: float
) -> EdgeConfig:
    chosen = MODES[mode]
    return EdgeConfig(
        device=DeviceConfig(name=f"demo.{mode}", state=state / mode),
        broker=BrokerConfig(port=port),
        drafter=DrafterConfig(model=drafter, threads=threads),
        drafting=DraftingConfig(policy=chosen.policy),  # type: ignore[arg-type]
        session=SessionConfig(
            patience_s=chosen.patience_s, max_tokens=max_tokens, temperature=temperature, top_p=top_p
        ),
    )
