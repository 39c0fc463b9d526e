"""The tenants of one verifier: what each was promised, what it has used of that, and how its guesses fare.

Guesses are judged tenant by tenant, and so is the guard over them: rubbish costs who sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from cloud.acceptance import Rates
from cloud.fairness import RoundRobin
from cloud.goodput import Goodput

ANY = "*"  # the contract of all that have none of their own
BURST_S = 1.0  # of a tenant's rows a second, that it may have at once


@dataclass(frozen=True, slots=True)
class Contract:
    """weight: of the tenant's share of a full verifier; sessions: open at once; context: tokens of a text; rows_per_s:
    rows of all kinds, longer steps held back; tokens_per_day: committed in a UTC day. None or inf is no limit.

    patience_least_s: how long its sessions are held while the verifier is crowded, whatever their devices wish;
    patience_most_s: how long at all.
    """

    weight: float = 1.0
    sessions: int | None = None
    context: int | None = None
    rows_per_s: float = inf
    tokens_per_day: int | None = None
    patience_least_s: float = 0.0
    patience_most_s: float = inf


class Day(Protocol):
    """What was used in the current UTC day, at all verifiers that share the record."""

    def today(self, tenant: str) -> int:
        """Tokens committed."""

    def left_s(self) -> float:
        """Seconds until the day is over."""


class Tenant:
    """One tenant at one verifier. num_sessions: open; rates: how its guesses fare; goodput: the guard over them."""

    def __init__(self, name: str, contract: Contract) -> None:
        self.name, self.contract = name, contract
        self.num_sessions = 0
        self.rates = Rates()
        self.goodput = Goodput()
        self._paid_until = -inf

    def ready_at(self) -> float:
        """When it may have rows again: its steps so far are paid for by then, but for a burst."""
        return self._paid_until - BURST_S

    def charge(self, rows: int, now: float) -> None:
        """It has had rows. A bucket that leaks `rows_per_s` (the generic cell rate algorithm, ITU-T I.371)."""
        if self.contract.rows_per_s < inf:
            self._paid_until = max(self._paid_until, now) + rows / self.contract.rows_per_s


class Tenants:
    """Tenants by name, made when they are first heard of. turns, prefill_turns: whose rows are next where not all fit,
    rows that draw tokens and those of prompts.
    """

    def __init__(self, contracts: Mapping[str, Contract] | None = None) -> None:
        self.turns, self.prefill_turns = RoundRobin(), RoundRobin()
        self._contracts = contracts or {}
        self._tenants: dict[str, Tenant] = {}

    def __getitem__(self, name: str) -> Tenant:
        if name not in self._tenants:
            contract = self._contracts.get(name) or self._contracts.get(ANY) or Contract()
            self._tenants[name] = Tenant(name, contract)
        return self._tenants[name]

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        return {name: self[name].contract.weight for name in names}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())
