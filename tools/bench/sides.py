"""What computes at both ends of the benchmark's link: a replay of traces, or real models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from edge.config import DraftingConfig
from edge.drafters import manifest
from edge.text import Text
from link.config import BrokerConfig
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from tools.arrivals import mean_gap_ms
from tools.bench.timed import scripts_of
from tools.boards import BoardTiming
from tools.demo.alone import texts_alone
from tools.demo.prompts import PROMPTS
from tools.models import prepare
from tools.modes import MODES
from tools.player import Part, Player
from tools.stage import Stage
from tools.twin.fleet import Scene, simulate
from tools.twin.replay import Script, StepTime

MOST_GAMMA = 16
REAL_GAMMAS = (2, 4, 6, 8)  # that a rehearsal of the first text chooses from: each costs the time of a text
WARM_TOKENS = 12
NUMERICS = "exact"  # so that the ids of all modes can be compared


@dataclass(frozen=True)
class Way:
    """A mode over a link of rtt_ms; colocated: drafter and verifier are on one host, with no link between them."""

    mode: str
    rtt_ms: float
    colocated: bool = False
    gamma: int = 0

    @property
    def name(self) -> str:
        return f"colocated_{self.mode}" if self.colocated else self.mode


class Sides(Protocol):
    """texts: how many there are."""

    @property
    def texts(self) -> int: ...

    def serve(self, stage: Stage) -> None:
        """Start the verifier."""

    def player(self, stage: Stage, broker: BrokerConfig, *, colocated: bool) -> Player:
        """Start the board's process."""

    def part(self, way: Way, text: int, *, warm: bool = False) -> Part:
        """What to ask a player for. warm: a short one that is not measured."""

    def best_gamma(self, way: Way, player: Player) -> int:
        """How many guesses a synchronous round should hold there."""

    def expected(self) -> list[list[int]]:
        """[texts] the ids that the target writes alone."""

    def twin_ms(self, way: Way) -> float | None:
        """What the twin says of it in ms a token; None where there is no twin."""

    def facts(self) -> dict[str, Any]:
        """What was computed with, for the record."""


@dataclass
class Replayed:
    """Calibrated waits that replay traces. step_s, prefill_row_s: of the verifier; colocated: the drafter beside it."""

    files: Sequence[Path]
    scripts: Sequence[Script]
    board: BoardTiming
    colocated: BoardTiming
    step_s: float
    prefill_row_s: float
    _twin: dict[Way, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, files: Sequence[Path], texts: int, prompt_tokens: int, board: BoardTiming, colocated: BoardTiming,
        step_s: float, prefill_row_s: float,
    ) -> Replayed:  # fmt: skip
        """texts: the first so many, all where it is 0. Raises ConfigError for a file that is no trace file."""
        return cls(files, scripts_of(files, texts, prompt_tokens), board, colocated, step_s, prefill_row_s)

    @property
    def texts(self) -> int:
        return len(self.scripts)

    def _script_options(self) -> list[str]:
        files = [f"--traces={file.absolute()}" for file in self.files]
        return [*files, f"--texts={self.texts}", f"--prompt-tokens={self.scripts[0].prompt_len}"]

    def serve(self, stage: Stage) -> None:
        broker = stage.broker()
        ca = [f"--ca={broker.tls.ca}"] if broker.tls else []
        times = [f"--step-s={self.step_s}", f"--prefill-row-s={self.prefill_row_s}"]
        stage.serve(
            ["-m", "tools.bench.replay_verifier", f"--port={broker.port}", *ca, *times, *self._script_options()]
        )

    def player(self, stage: Stage, broker: BrokerConfig, *, colocated: bool) -> Player:
        board = self.colocated if colocated else self.board
        options = [
            f"--pass-s={board.pass_s}",
            f"--row-share={board.row_share}",
            f"--prefill-tokens-per-s={board.prefill_tokens_per_s}",
            *self._script_options(),
        ]
        return Player("tools.bench.replay_board", options, broker, stage.folder / "state")

    def part(self, way: Way, text: int, *, warm: bool = False) -> Part:
        tokens = WARM_TOKENS if warm else len(self.scripts[text].trace.target)
        return Part(way.mode, text, tokens, seed=text, gamma=way.gamma)

    def best_gamma(self, way: Way, player: Player) -> int:
        """By the twin."""
        gammas = range(1, MOST_GAMMA + 1)
        return min(gammas, key=lambda gamma: self.twin_ms(Way(way.mode, way.rtt_ms, way.colocated, gamma)))

    def expected(self) -> list[list[int]]:
        return [list(script.trace.target) for script in self.scripts]

    def twin_ms(self, way: Way) -> float:
        """Behind a first text that is not counted: the live verifier knows its own steps by then, too."""
        if way not in self._twin:
            mode = MODES[way.mode]
            drafting = DraftingConfig(policy=mode.policy, **({"gamma": way.gamma} if way.gamma else {}))  # type: ignore[arg-type]
            scene = Scene(
                self.scripts,
                self.colocated if way.colocated else self.board,
                StepTime(step_s=self.step_s, prefill_row_s=self.prefill_row_s),
                drafting,
                patience_s=mode.patience_s,
                rtt_s=way.rtt_ms / 1e3,
                texts=self.texts + 1,
            )
            self._twin[way] = fmean(mean_gap_ms(story.arrivals) for story in simulate(scene).stories[0][1:])
        return self._twin[way]

    def facts(self) -> dict[str, Any]:
        def of(board: BoardTiming) -> dict[str, float]:
            return {
                "pass_ms": board.pass_s * 1e3,
                "row_share": board.row_share,
                "prefill_tokens_per_s": board.prefill_tokens_per_s,
            }

        return {
            "computing": "replayed",
            "traces": [file.name for file in self.files],
            "acceptance": [round(script.trace.acceptance, 3) for script in self.scripts],
            "tokens": [len(script.trace.target) for script in self.scripts],
            "prompt_tokens": [script.prompt_len for script in self.scripts],
            "board": of(self.board),
            "colocated": of(self.colocated),
            "cloud": {"step_ms": self.step_s * 1e3, "prefill_tokens_per_s": round(1 / self.prefill_row_s)},
        }


@dataclass
class Real:
    """A real pair, one core each where there are two."""

    drafter: Path
    target: Path
    texts: int
    max_tokens: int

    def __post_init__(self) -> None:
        self._text = Text.load(self.drafter, manifest.read(self.drafter, "drafter"))
        self._player: Player | None = None

    @classmethod
    def of(cls, pair: str, texts: int, max_tokens: int) -> Real:
        """texts: the first so many prompts, all where it is 0. Raises ConfigError where there are fewer."""
        if texts > len(PROMPTS):
            raise ConfigError(f"there are {len(PROMPTS)} prompts, not {texts}", where="--texts")
        return cls(*prepare(pair), texts or len(PROMPTS), max_tokens)

    def serve(self, stage: Stage) -> None:
        stage.serve_model(self.target, numerics=NUMERICS, core=(os.cpu_count() or 1) - 1)

    def player(self, stage: Stage, broker: BrokerConfig, *, colocated: bool) -> Player:
        self._player = Player("tools.demo.board", [f"--drafter={self.drafter}"], broker, stage.folder / "state", core=0)
        return self._player

    def part(self, way: Way, text: int, *, warm: bool = False) -> Part:
        tokens = WARM_TOKENS if warm else self.max_tokens
        return Part(way.mode, text, tokens, seed=text + 1, gamma=way.gamma)

    def best_gamma(self, way: Way, player: Player) -> int:
        """By a rehearsal of the first text."""

        def rehearsed_ms(gamma: int) -> float:
            done = player.play(self.part(Way(way.mode, way.rtt_ms, way.colocated, gamma), 0))
            return mean_gap_ms(done["arrivals"])

        return min(REAL_GAMMAS, key=rehearsed_ms)

    def expected(self) -> list[list[int]]:
        return texts_alone(self.target, self._text, PROMPTS[: self.texts], NUMERICS, Sampling(), self.max_tokens)

    def twin_ms(self, way: Way) -> None:
        return None

    def facts(self) -> dict[str, Any]:
        prompts = [self._text.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS[: self.texts]]
        target = manifest.read(self.target, "target")
        return {
            "computing": "real",
            "drafter": self._player.facts["drafter"] if self._player else {},
            "target": {"name": target.name, "dtype": target.dtype, "numerics": NUMERICS},
            "quantisation": manifest.read(self.drafter, "drafter").quantisation,
            "threads": {"board": 1, "verifier": 1},
            "max_tokens": self.max_tokens,
            "prompt_tokens": [len(prompt) for prompt in prompts],
        }
