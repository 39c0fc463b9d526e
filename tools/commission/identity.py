"""A board's enrolment from outside: its key is made on the board by the board, what travels is request and answer."""

from __future__ import annotations

from datetime import datetime, timedelta

from edge.enroll import IdentityError
from link.config import TlsConfig
from tools.flash.agent import USER
from tools.flash.places import Place
from tools.flash.plan import COMMAND
from tools.provision import office
from tools.provision.folder import Folder

CODE_LIFE, CERTIFICATE_LIFE = timedelta(hours=1), timedelta(days=730)


def request(place: Place, code: str) -> bytes:
    """Made by the board, as the service's user. Raises CommandError."""
    return place.must([COMMAND, "enroll", "--request", "-"], user=USER, stdin=f"{code}\n".encode())


def install(place: Place, tls: TlsConfig, answer: bytes) -> tuple[str, bool]:
    """(what the board said, whether its certificate is another now). Raises CommandError."""
    look = ["cat", str(tls.cert)]
    before = place.run(look, user=USER).stdout
    said = place.must([COMMAND, "enroll", "--answer", "-"], user=USER, stdin=answer)
    return said.decode().strip(), place.run(look, user=USER).stdout != before


def answer(place: Place, device: str, tls: TlsConfig, folder: Folder, now: datetime, *, again: bool = False) -> bytes:
    """By an authority at hand: for a board that is enrolled what it has, or a new certificate where that is due;
    otherwise a code is made and spent. An interrupted enrolment goes on where it was.

    again: enrol it anew whatever there is. Raises IdentityError where that would be needed.
    """
    with folder.held():
        member = folder.register().find("board", device)
        if member is None or not member.issued or again:
            code, _ = office.add(folder, device, now, CODE_LIFE, again=True)
            folder.finish()
            data, _ = office.sign(folder, request(place, code), "the board's request", now, CERTIFICATE_LIFE)
        else:
            _check_known(place, device, tls, member.state(now))
            answers, _ = office.renew(folder, [device], now, CERTIFICATE_LIFE)
            data = answers[device]
        folder.finish()
    return data


def _check_known(place: Place, device: str, tls: TlsConfig, state: str) -> None:
    if state == "revoked":
        raise IdentityError("is revoked", where=device, remedy="`--again` enrols it anew")
    if place.run(["test", "-e", str(tls.key)], user=USER).returncode:
        raise IdentityError(
            f"is {state} with a key that this board does not have",
            where=device,
            remedy="Name another board; or say `--again`, and what is enrolled under this name loses its certificate",
        )
