"""Whether a session is taken: what was asked for, and what its tenant was promised."""

from __future__ import annotations

from dataclasses import dataclass

from cloud.engines.base import TargetInfo
from cloud.tenants import Day, Tenant
from protocol.messages import ErrorCode, Open

RETRY_MS = 2000


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. code: of `protocol.messages.ErrorCode`; retry_ms: when to ask again, None where that is of no use."""

    code: str
    what: str
    retry_ms: int | None = None


def unfit(message: Open, info: TargetInfo) -> Refusal | None:
    """What is wrong with the request itself, for this target."""
    if message.target != info.id:
        return Refusal(ErrorCode.WRONG_TARGET, f"this verifier serves {info.id}, not {message.target}")
    outside = next((id for id in message.ids if id >= info.vocab_size), None)
    if outside is not None:
        return Refusal(ErrorCode.BAD_OPEN, f"id {outside} is outside the vocabulary of {info.vocab_size}")
    if len(message.ids) > info.context or message.prompt_len >= info.context:
        what = f"a text of {len(message.ids)} tokens does not fit the context of {info.context}"
        return Refusal(ErrorCode.OVER_CONTEXT, what)
    if message.max_tokens < 1:
        return Refusal(ErrorCode.BAD_OPEN, "max_tokens is less than 1")
    return None


def over_contract(tenant: Tenant, message: Open, day: Day | None, now: float) -> Refusal | None:
    """Which limit of its tenant the session would break."""
    contract = tenant.contract
    if contract.context is not None and (len(message.ids) > contract.context or message.prompt_len >= contract.context):
        what = f"a text of {len(message.ids)} tokens is over {tenant.name}'s context of {contract.context}"
        return Refusal(ErrorCode.OVER_CONTEXT, what)
    if contract.sessions is not None and tenant.num_sessions >= contract.sessions:
        return Refusal(ErrorCode.OVER_LIMIT, f"{tenant.name} has its {contract.sessions} sessions open", RETRY_MS)
    if tenant.ready_at() > now:
        what = f"{tenant.name} has had its {contract.rows_per_s:g} rows a second"
        return Refusal(ErrorCode.OVER_LIMIT, what, round(1000 * (tenant.ready_at() - now)) + 1)
    if day is not None and spent(tenant, day):
        return out_of_tokens(tenant, day)
    return None


def spent(tenant: Tenant, day: Day) -> bool:
    """Whether a tenant has had its tokens of the day."""
    most = tenant.contract.tokens_per_day
    return most is not None and day.today(tenant.name) >= most


def out_of_tokens(tenant: Tenant, day: Day) -> Refusal:
    what = f"{tenant.name} has had its {tenant.contract.tokens_per_day} tokens of the day (UTC)"
    return Refusal(ErrorCode.OVER_LIMIT, what, round(1000 * day.left_s()) + 1)
