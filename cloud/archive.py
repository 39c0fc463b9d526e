"""Complete texts, for the next turns of their conversations: a device need not send again what both sides have."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import msgspec

from cloud.ledger import Ledger
from protocol.messages import Open
from protocol.text import Ids

MOST_TOKENS = 2_000_000  # 4 bytes each


class Archive:
    """The ids of the latest complete texts, by device and session; the oldest give way."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = 0
        self._texts: OrderedDict[tuple[str, int], array[int]] = OrderedDict()

    def keep(self, ledger: Ledger) -> None:
        """The session is over."""
        self._tokens -= len(self._texts.pop((ledger.device, ledger.session), ()))
        self._texts[ledger.device, ledger.session] = array("I", ledger.text)
        self._tokens += ledger.frontier
        while self._tokens > self._most:
            self._tokens -= len(self._texts.popitem(last=False)[1])

    def whole(self, device: str, message: Open) -> Open | None:
        """The open with its prefix written out; None where that text is not held, or is shorter."""
        assert message.prefix is not None
        session, length = message.prefix
        text = self._texts.get((device, session))
        if text is None or len(text) < length:
            return None
        return msgspec.structs.replace(message, ids=Ids((*text[:length], *message.ids)), prefix=None)
