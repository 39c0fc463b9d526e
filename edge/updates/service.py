"""Updates of a running board: the updater, joined to the board's link, sessions and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edge.board import Board
from edge.updates.boot import Boot
from edge.updates.fetch import HttpsFetcher
from edge.updates.manifest import Facts
from edge.updates.selftest import SelfTest
from edge.updates.updater import Updater
from link.command import package_version


class Following:
    """Follows the channel of `[updates]` from now until `close`.

    board: its drafter is loaded, its link not started; again: asked to end this process and to begin again, when a
    release is to be tried or rolled back.
    """

    def __init__(self, boot: Boot, config_path: Path, board: Board, again: Callable[[], None]) -> None:
        updates = boot.config.updates
        assert updates is not None
        settings = boot.settings()
        if settings.log_level is not None:
            logging.getLogger().setLevel(settings.log_level.upper())
        facts = Facts(
            board.device,
            board.config.board.kind,
            updates.channel,
            package_version(),
            board.drafter.info.tokenizer_digest,
        )
        self._updater = Updater(
            boot.store,
            facts,
            updates.rule,
            fetcher=HttpsFetcher(updates.ca),
            test=SelfTest(config_path, boot.config, board.config.drafter.model),
            idle=lambda: not board.busy,
            restart=again,
            tell=board.tell_releases,
            moved=board.moved,
            data_cap_mb=updates.data_cap_mb if settings.data_cap_mb is None else settings.data_cap_mb,
        )
        board.follow(self._updater, updates.channel)
        self._updater.start()

    def close(self) -> None:
        self._updater.close()
