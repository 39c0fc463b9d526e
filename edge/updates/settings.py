"""What may be changed from afar, and no more: each field typed, absent ones left as the board's own file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from edge.updates.errors import SelfTestError
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from edge.config import EdgeConfig


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """patience_s: default of sessions, 1e9 waits for ever (JSON has no infinity); policy: how the board drafts;
    log_level; data_cap_mb: megabytes (10^6) a month that sessions and fetching may take, 0 fetches nothing.
    """

    patience_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    policy: Literal["auto", "chain", "tree", "sync", "none"] | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    data_cap_mb: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None


FOR_EVER_S = 1e9


def apply(config: EdgeConfig, settings: Settings) -> EdgeConfig:
    """The configuration under these settings. Raises SelfTestError where the two do not go together."""
    session, drafting = config.session, config.drafting
    try:
        if settings.patience_s is not None:
            patience_s = float("inf") if settings.patience_s >= FOR_EVER_S else settings.patience_s
            session = msgspec.structs.replace(session, patience_s=patience_s)
        if settings.policy is not None:
            drafting = msgspec.structs.replace(drafting, policy=settings.policy)
        return msgspec.structs.replace(config, session=session, drafting=drafting)
    except (ConfigError, ValueError) as error:
        raise SelfTestError(
            f"the settings do not fit this board's file: {error}", remedy="Announce settings that go together"
        ) from None
