"""What is fuzzed: the function of each target, the modules whose branches guide it, and its part of the executions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Target(NamedTuple):
    """module: has `fuzz(data)`; watched: modules that are instrumented; most_bytes: of an input; share: of all
    executions.
    """

    module: str
    watched: tuple[str, ...]
    most_bytes: int
    share: float

    def load(self) -> Callable[[bytes], None]:
        """What takes an input, and raises AssertionError or whatever else is a finding."""
        return importlib.import_module(self.module).fuzz

    def seeds(self) -> Sequence[bytes]:
        """Inputs that take long to find, since what reads them is a C library, whose branches are not watched."""
        return getattr(importlib.import_module(self.module), "SEEDS", ())


TARGETS = {
    "messages": Target("tests.fuzz.messages", ("protocol.messages", "protocol.text", "protocol.sampling"), 256, 0.36),
    "packets": Target("tests.fuzz.packets", ("link.packets",), 256, 0.355),
    "ledger": Target("tests.fuzz.ledger", ("cloud.ledger", "cloud.advice"), 96, 0.13),
    "window": Target("tests.fuzz.window", ("edge.window", "edge.cadence"), 96, 0.13),
    "board": Target("tests.fuzz.board", ("edge.drafters.container", "edge.drafters.native"), 300, 0.005),
    "ends": Target("tests.fuzz.ends", ("cloud.ledger", "cloud.verifier", "edge.window", "protocol.tree"), 160, 0.02),
}
