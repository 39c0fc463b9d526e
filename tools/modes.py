"""The ways to get a text over the link that demo, twin and benchmark compare."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from edge.config import PolicyName


@dataclass(frozen=True, slots=True)
class Mode:
    """A drafting policy, by its name in [drafting], and the patience that belongs to it."""

    title: str
    policy: PolicyName
    patience_s: float


MODES = {
    "cloud": Mode("cloud alone", "none", 0.0),
    "sync": Mode("synchronous", "sync", inf),
    "async": Mode("verifier waits", "chain", inf),
    "never_wait": Mode("never waits", "chain", 0.0),
    "tree": Mode("tree, never waits", "tree", 0.0),
    "auto": Mode("auto", "auto", 0.0),
}
