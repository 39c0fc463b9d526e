"""`outrider-edge run` with a toy for a model, in a process of its own: `python -m tests.edge.service_child CONFIG`.

SCRIPT, an environment variable, says what happens: the drafter `reads`, `hangs` or is `slow`, or the link is `deaf`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from unittest import mock

from edge import cli
from edge.board import Board
from tests.toys import ToyDrafter, ToyRow

CHUNKS, CHUNK_S = 7, 0.3


def hang(*_: object) -> None:
    time.sleep(3600)


class ScriptedDrafter(ToyDrafter):
    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> ToyRow:
        match os.environ["SCRIPT"]:
            case "hangs":
                hang()
            case "slow":
                for chunk in range(CHUNKS):
                    time.sleep(CHUNK_S)
                    assert progress is not None
                    progress(chunk, CHUNKS)
        return super().prefill(ids)


if __name__ == "__main__":
    drafter = ScriptedDrafter()
    if os.environ["SCRIPT"] == "deaf":
        Board._on_state = hang  # type: ignore[method-assign]
    with (
        mock.patch.object(cli, "load_drafter", lambda config: drafter),
        mock.patch.object(cli, "load_text", lambda config: SimpleNamespace()),
    ):
        cli.main(["run", "--config", sys.argv[1]])
