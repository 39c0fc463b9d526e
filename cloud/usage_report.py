"""From the meter's lines to what each tenant and device is billed for (docs/metering.md).

A text is billed for how far it was ever committed, once, whoever drew it: its bill is one position that only grows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.table import Table

from cloud.records import Line, Records
from protocol.errors import ConfigError
from protocol.topics import tenant_of


@dataclass(slots=True)
class Account:
    """What a device, or a tenant, had of one target.

    sessions: texts; prompt_tokens: theirs; tokens: billed; gap_tokens: those of them without a line of their own, which
    a crash cost, though a verifier went on behind them; again_tokens: drawn once more, not billed. The rest: see
    `cloud.usage.Usage`.
    """

    sessions: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    gap_tokens: int = 0
    again_tokens: int = 0
    accepted: int = 0
    root_rows: int = 0
    draft_rows: int = 0
    prefill_rows: int = 0
    rebuilt_rows: int = 0
    engine_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, other: Account) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def check_day(day: str) -> str:
    """Raises ConfigError for what is not a day, a month or a year, or empty."""
    if day and not re.fullmatch(r"\d{4}(-\d\d(-\d\d)?)?", day):
        raise ConfigError(f"{day!r} is not a day", where="--day", remedy="Write 2026-11-29, or a month as 2026-11.")
    return day


def bill(lines: Iterable[Line], day: str = "") -> dict[tuple[str, str], Account]:
    """Accounts by (device, target). day: "2026-11-29", or the beginning of one as "2026-11"; what comes later is not
    looked at, what came before decides what is billed already.
    """
    accounts: dict[tuple[str, str], Account] = {}
    billed_to: dict[tuple[str, str, str, str], int] = {}
    for line in sorted(lines, key=lambda line: (line.day, line.start, line.end, line.key)):
        text = (line.device, line.target, line.session, line.text)
        is_new = text not in billed_to
        reached = billed_to.get(text, line.prompt)
        grew = line.end > line.start  # else nothing shows that the text before it was ever committed
        billed_to[text] = max(reached, line.end) if grew else reached
        if not line.day.startswith(day):
            continue
        account = accounts.setdefault((line.device, line.target), Account())
        account.sessions += is_new
        account.prompt_tokens += line.prompt if is_new else 0
        account.tokens += billed_to[text] - reached
        account.gap_tokens += max(0, line.start - reached) if grew else 0
        account.again_tokens += max(0, min(reached, line.end) - line.start)
        for name in ("accepted", "root_rows", "draft_rows", "prefill_rows", "rebuilt_rows", "engine_s"):
            setattr(account, name, getattr(account, name) + getattr(line, name))
        account.bytes_in += line.bytes_in
        account.bytes_out += line.bytes_out
    return accounts


def report(records: Records, day: str = "") -> dict[str, object]:
    """What `outrider-cloud usage --json` prints: a list of accounts by tenant, device and target."""
    accounts = bill(records.last.values(), day)
    rows = [
        {"tenant": tenant_of(device), "device": device, "target": target, **asdict(account)}
        for (device, target), account in sorted(accounts.items())
    ]
    return {"day": day, "unreadable_lines": records.unreadable, "accounts": rows}


def table(records: Records, day: str = "") -> Table:
    """The same for a person, with a sum for each tenant."""
    made = Table(title=f"usage {day}".strip())
    for name in ("tenant", "device", "target"):
        made.add_column(name)
    columns = (
        "sessions",
        "tokens",
        "gap",
        "again",
        "root",
        "draft",
        "prefill",
        "rebuilt",
        "cloud s",
        "in kB",
        "out kB",
    )
    for name in columns:
        made.add_column(name, justify="right")
    accounts = sorted(bill(records.last.values(), day).items())
    tenants: dict[str, Account] = {}
    for i, ((device, target), account) in enumerate(accounts):
        tenant = tenant_of(device)
        tenants.setdefault(tenant, Account()).add(account)
        made.add_row(tenant, device.partition(".")[2], target, *_cells(account))
        if i + 1 == len(accounts) or tenant_of(accounts[i + 1][0][0]) != tenant:
            made.add_row(tenant, "all", "", *_cells(tenants[tenant]), style="bold", end_section=True)
    return made


def _cells(account: Account) -> list[str]:
    counts = (
        *(account.sessions, account.tokens, account.gap_tokens, account.again_tokens),
        *(account.root_rows, account.draft_rows, account.prefill_rows, account.rebuilt_rows),
    )
    kilobytes = (account.bytes_in / 1000, account.bytes_out / 1000)
    return [*(f"{n:,}" for n in counts), f"{account.engine_s:,.1f}", *(f"{size:,.1f}" for size in kilobytes)]
