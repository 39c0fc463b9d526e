"""How fast a board drafts: three typical ones, by name, for the plan and the twin.

The figures are parameters that planning starts from, not measurements of a product: a 0.5B drafter with 4-bit weights
on a Raspberry Pi 5's CPU and on the GPUs of two Jetsons. A board in hand is measured, and its own figures used.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError


@dataclass(frozen=True)
class BoardTiming:
    """pass_s: a drafter's pass of one row, in s; row_share: what each further row adds, as a share of `pass_s`;
    prefill_tokens_per_s: prompt tokens the drafter reads a second.
    """

    pass_s: float
    row_share: float
    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        if self.pass_s <= 0 or self.row_share < 0 or self.prefill_tokens_per_s <= 0:
            raise ConfigError(
                f"{self} is no timing of a board",
                remedy="Times and rates are above zero, `row_share` is zero or more",
            )

    def rows_s(self, num_rows: int) -> float:
        """One pass of `num_rows` >= 1 rows, in s."""
        return self.pass_s * (1 + self.row_share * (num_rows - 1))

    def prefill_s(self, num_tokens: int) -> float:
        """Reading a prompt of `num_tokens`, in s."""
        return num_tokens / self.prefill_tokens_per_s


BOARDS = {
    "pi5": BoardTiming(pass_s=0.033, row_share=0.50, prefill_tokens_per_s=120.0),
    "orin-nano": BoardTiming(pass_s=0.012, row_share=0.15, prefill_tokens_per_s=1500.0),
    "agx": BoardTiming(pass_s=0.008, row_share=0.10, prefill_tokens_per_s=4000.0),
}


def board_timing(name: str) -> BoardTiming:
    """The board of that name. Raises ConfigError that lists the known ones."""
    try:
        return BOARDS[name]
    except KeyError:
        raise ConfigError(f"no board {name!r}", where="boards", remedy=f"Known: {', '.join(BOARDS)}") from None
