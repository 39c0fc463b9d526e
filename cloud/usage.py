"""What a session has cost and what it got for it, and who wants to hear of such things."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloud.engines.base import Outcome

if TYPE_CHECKING:
    from cloud.ledger import Ledger
    from cloud.scheduler import Step


@dataclass(slots=True)
class Usage:
    """Of one session at one verifier, ever growing.

    committed: tokens; accepted: those of them that draft rows were for; root_rows, draft_rows, prefill_rows: evaluated
    by kind; rebuilt_rows: those of prefill that had been evaluated before an eviction; engine_s: its part, by rows, of
    the time of the steps that it was in; bytes_in, bytes_out: payloads.
    """

    committed: int = 0
    accepted: int = 0
    root_rows: int = 0
    draft_rows: int = 0
    prefill_rows: int = 0
    rebuilt_rows: int = 0
    engine_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


class Observer:
    """Hears of what a verifier does, on the thread that runs it: it must be quick and raise nothing."""

    def opened(self, ledger: Ledger) -> None:
        """A session was admitted."""

    def refused(self, device: str, code: str, what: str = "", session: int = 0) -> None:
        """An `Error` was sent to a device, or what it sent was dropped; code: see `protocol.messages.ErrorCode`. device
        and session are empty and 0 where nobody knows.
        """

    def stepped(self, step: Step, outcome: Outcome, queue_s: float) -> None:
        """A step is over, and its tokens are committed. queue_s: mean time for which its root rows had been due
        and sessions without room had waited.
        """

    def evicted(self, ledger: Ledger) -> None:
        """A session's KV was taken away."""

    def closed(self, ledger: Ledger) -> None:
        """A session is forgotten; `ledger.usage` is final."""

    def flush(self, ledgers: Collection[Ledger], now: float) -> None:
        """About every second: the sessions that are open."""

    def close(self) -> None:
        """The verifier has ended; nothing more will come."""
