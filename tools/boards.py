"""How fast a board drafts, for the plan and the twin: what `[board.expected]` of the files in board_configs/ says.

Most figures are parameters that planning starts from, not measurements; each file says where its own are from, and
whether they were tested. A board in hand is measured, and its own figures used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.config import EdgeConfig
from link.config import load
from protocol.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "board_configs"
SHORT = {"pi5": "raspberry-pi-5", "orin-nano": "jetson-orin-nano", "agx": "jetson-agx-orin"}


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


NAMES = [*SHORT, *sorted(path.stem for path in FOLDER.glob("*.toml"))]


def board_timing(name: str) -> BoardTiming:
    """Of the board of that file or short name. Raises ConfigError that lists the known ones."""
    if name not in NAMES:
        raise ConfigError(f"no board {name!r}", where="boards", remedy=f"Known: {', '.join(NAMES)}")
    path = FOLDER / f"{SHORT.get(name, name)}.toml"
    expected = load(path, EdgeConfig).board.expected
    if expected is None:
        raise ConfigError("no [board.expected]", where=str(path), remedy="Measure the board and say its times")
    return BoardTiming(expected.pass_ms / 1e3, expected.row_share, expected.prefill_tokens_per_s)


BOARDS = {name: board_timing(name) for name in SHORT}
