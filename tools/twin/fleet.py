"""A fleet in the twin: devices that ask for one text after another, and what came of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from cloud.config import SchedulerConfig
from cloud.probe import probe
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds
from edge.calibration import Calibration
from edge.config import DraftingConfig
from edge.drafters.base import Drafter
from edge.drafters.mixed import MixedDrafter, MixedOdds
from edge.drafters.suffix import SuffixDrafter
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from protocol.errors import OutriderError
from protocol.sampling import Sampling
from tools.boards import BoardTiming
from tools.twin.replay import TARGET, ReplayDrafter, ReplayEngine, Script, StepTime
from tools.twin.world import Board, Cloud, Story, World


@dataclass(frozen=True)
class Scene:
    """What is simulated. Times in s; texts: how many each device asks for, one after another; spread_s: the devices
    start within this time; seed: of starts and of candidates off the target's text; share: of its time that a board may
    draft, less than 1 where it is hot; suffix: whether what was written before is guessed, beside the trace's drafter
    (`mixed`) or in its place (`alone`).
    """

    scripts: Sequence[Script]
    board: BoardTiming
    time: StepTime
    drafting: DraftingConfig
    patience_s: float = 0.0
    rtt_s: float = 0.05
    devices: int = 1
    texts: int = 0
    verifiers: int = 1
    spread_s: float = 0.0
    seed: int = 0
    share: float = 1.0
    suffix: Literal["off", "mixed", "alone"] = "off"
    scheduler: Scheduler | None = None
    bounds: Bounds | None = None


@dataclass
class Result:
    """stories: of each device, in order; steps, rows: of all verifiers; sim_s: virtual, wall_s: real seconds."""

    stories: list[list[Story]] = field(default_factory=list)
    runs: list[SessionRun] = field(default_factory=list)
    steps: int = 0
    rows: int = 0
    passes: int = 0
    sim_s: float = 0.0
    wall_s: float = 0.0


class TwinError(OutriderError):
    """The twin wrote another text than the trace's: the one thing that must never happen."""


def simulate(scene: Scene) -> Result:
    """Play the scene to its end. The same scene gives the same result, but for `wall_s`. Raises TwinError."""
    world = World(one_way_s=scene.rtt_s / 2)
    scheduler = scene.scheduler or SchedulerConfig().scheduler()
    bounds = scene.bounds or Bounds(sessions=scene.devices + 1)
    engines = [ReplayEngine(scene.scripts, scene.time) for _ in range(scene.verifiers)]
    clouds = [
        Cloud(world, f"v{i}", engine, scheduler, bounds, probe(engine, inf, bounds.draft_rows, lambda: 0.0))
        for i, engine in enumerate(engines)
    ]
    texts = scene.texts or len(scene.scripts)
    result = Result(stories=[[] for _ in range(scene.devices)])
    calibrations = [Calibration() for _ in range(scene.devices)]
    odds = [MixedOdds() for _ in range(scene.devices)]
    starts = random.Random(scene.seed)
    unfinished = scene.devices

    def drafter_of(device: int, script: Script) -> Drafter:
        replayed = ReplayDrafter(script, scene.seed)
        match scene.suffix:
            case "mixed":
                return MixedDrafter(replayed, odds[device])
            case "alone":
                return SuffixDrafter(replayed.info, odds[device].recall)
            case _:
                return replayed

    def begin(device: int) -> None:
        nonlocal unfinished
        turn = len(result.stories[device])
        if turn == texts:
            unfinished -= 1
            return
        number = (device + turn) % len(scene.scripts)
        script = scene.scripts[number]
        request = Request(
            device * texts + turn + 1,
            TARGET.id,
            script.prompt,
            Sampling(seed=number),
            len(script.trace.target),
            patience_s=scene.patience_s,
        )
        policy = scene.drafting.make(calibrations[device])

        def make(board: Board) -> SessionRun:
            window = Window(f"twin.b{device}", request, timing=Timing(), now=world.now)
            drafter = None if scene.drafting.policy == "none" else drafter_of(device, script)
            return SessionRun(
                window,
                drafter,
                policy,
                publish=board.publish,
                listener=board,
                clock=board.clock,
                share=lambda: scene.share,
            )

        def ended(board: Board) -> None:
            if board.story.ids != list(script.trace.target):
                raise TwinError(f"device {device}, text {number}: not the target's text", where="tools.twin")
            result.passes += board.run.passes
            result.runs.append(board.run)
            world.at(world.now, begin, device)

        board = Board(
            world, make, rows_s=scene.board.rows_s, prefill_s=scene.board.prefill_s(script.prompt_len), ended=ended
        )
        result.stories[device].append(board.story)

    for device in range(scene.devices):
        world.at(starts.uniform(0, scene.spread_s), begin, device)
    started = time.perf_counter()
    world.run(lambda: not unfinished)
    result.wall_s = time.perf_counter() - started
    result.sim_s = world.now
    result.steps = sum(cloud.tally.steps for cloud in clouds)
    result.rows = sum(cloud.tally.rows for cloud in clouds)
    return result
