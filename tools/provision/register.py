"""The register: everybody the authority has named, their codes and certificates; what state each is in."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["board", "verifier", "operator", "broker"]
State: TypeAlias = Literal["waiting", "lapsed", "enrolled", "due", "expired", "revoked"]

DUE = timedelta(days=60)  # a certificate that ends within this is to be renewed


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A one-time enrolment code. key: `edge.enroll.code_key` of it, hexadecimal; spent: whether it was used."""

    key: str
    ends: datetime
    spent: bool = False


class Issued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A certificate. serial: hexadecimal, its file's name too."""

    serial: str
    ends: datetime
    revoked: datetime | None = None


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that has or will have certificates; the newest is the last. name: a board's is its device's."""

    role: Role
    name: str
    code: Code | None = None
    issued: tuple[Issued, ...] = ()

    def state(self, now: datetime) -> State:
        """`waiting` and `lapsed`: there is no certificate yet, and its code is good or no longer; `due`: to be renewed;
        `revoked`, `expired`: cannot connect, until a new code is spent.
        """
        if not self.issued:
            return "waiting" if self.code and now < self.code.ends else "lapsed"
        newest = self.issued[-1]
        if newest.revoked is not None:
            return "revoked"
        if newest.ends <= now:
            return "expired"
        return "due" if newest.ends - now < DUE else "enrolled"

    @property
    def newest(self) -> Issued | None:
        return self.issued[-1] if self.issued else None

    def code_is_open(self, now: datetime) -> bool:
        """Whether a request can still be signed for its code."""
        return self.code is not None and not self.code.spent and now < self.code.ends

    def with_code(self, code: Code) -> Member:
        return msgspec.structs.replace(self, code=code)

    def with_certificate(self, issued: Issued) -> Member:
        return msgspec.structs.replace(self, issued=(*self.issued, issued))

    def revoke(self, now: datetime) -> Member:
        """All certificates that are good still, and the code."""
        issued = tuple(
            msgspec.structs.replace(one, revoked=now) if one.revoked is None and one.ends > now else one
            for one in self.issued
        )
        return msgspec.structs.replace(self, issued=issued, code=None)


class Register(msgspec.Struct, forbid_unknown_fields=True):
    """name: the fleet's; share: the secret that names the verifiers' shared subscription; members: by `key`."""

    name: str
    share: str
    version: int = 1
    members: dict[str, Member] = {}

    @staticmethod
    def key(role: Role, name: str) -> str:
        return f"{role} {name}"

    def find(self, role: Role, name: str) -> Member | None:
        return self.members.get(self.key(role, name))

    def put(self, member: Member) -> None:
        self.members[self.key(member.role, member.name)] = member

    def boards(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.role == "board")

    def revoked(self, now: datetime) -> Iterator[tuple[int, datetime]]:
        """(serial, since when) of the certificates that would be good otherwise."""
        for member in self.members.values():
            for one in member.issued:
                if one.revoked is not None and one.ends > now:
                    yield int(one.serial, 16), one.revoked

    def barred(self, now: datetime) -> list[str]:
        """Boards whose newest certificate is revoked and not yet expired: their open connections are to fall silent."""
        return [
            board.name
            for board in self.boards()
            if (newest := board.newest) and newest.revoked is not None and newest.ends > now
        ]
