"""What the authority does: adds, signs, renews, revokes, and writes what the broker reads. Nothing here touches a disk
before `Folder.write`, so that every act can be rehearsed, and each can be done again without harm.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path, PurePath

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge.enroll import (
    PRIVATE,
    VERSION,
    Answer,
    IdentityError,
    Request,
    code_key,
    key_bytes,
    proof,
    read,
    read_key,
)
from protocol.errors import WireError
from protocol.topics import check_device, check_name
from tools.provision.authority import LIST_LIFE, Authority, general_name, hosts_of, pem
from tools.provision.broker import access_list, configuration
from tools.provision.folder import CERTIFICATE, KEY, REVOCATIONS, ExistsError, Folder, MissingError
from tools.provision.register import Code, Issued, Member, Register, Role

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32: nothing in it is misread
AUTHORITY_LIFE = timedelta(days=20 * 365)


def init(folder: Folder, fleet: str, now: datetime) -> str:
    """Make the authority; where there is one of this fleet, leave it. Raises ExistsError, WireError."""
    check_name(fleet, "fleet")
    if folder.is_made():
        if (there := folder.register().name) != fleet:
            raise ExistsError(f"is the authority of {there!r}", where=str(folder.path), remedy="Name another folder")
        return f"{folder.path} is the authority of {fleet!r} already"
    made = Authority.make(f"Outrider {fleet}", now, AUTHORITY_LIFE)
    folder.put(folder.path / KEY, key_bytes(made.key), PRIVATE)
    folder.put(folder.path / CERTIFICATE, pem(made.certificate))
    folder.put(folder.path / REVOCATIONS, made.revocations((), now))
    folder.put_register(Register(name=fleet, share=secrets.token_hex(16)))
    return f"{folder.path}: the authority of {fleet!r}. Whoever has {KEY} can be any board: keep it offline"


def add(folder: Folder, device: str, now: datetime, code_life: timedelta, *, again: bool = False) -> tuple[str, str]:
    """(one-time code, what happened); the code is "" where the board needs none. Raises WireError.

    again: make a new code for a board that has one, or that is enrolled and shall be anew.
    """
    check_device(device)
    register = folder.register()
    board = register.find("board", device)
    if board is not None and not again and not (board.newest is None and not board.code_is_open(now)):
        return "", f"{device} is {board.state(now)} already; --again makes a new code"
    letters = "".join(secrets.choice(ALPHABET) for _ in range(20))  # 100 bits
    code = "-".join(letters[at : at + 5] for at in range(0, 20, 5))
    opened = Code(key=code_key(device, code).hex(), ends=now + code_life)
    register.put((board or Member("board", device)).with_code(opened))
    folder.put_register(register)
    return code, f"{device}: an enrolment code, for one request until {opened.ends:%Y-%m-%d %H:%M} UTC"


def sign(folder: Folder, data: bytes, where: str, now: datetime, life: timedelta) -> tuple[bytes, str]:
    """(answer file, what happened) to a board's request. The same request again gets the same answer; what the board
    had before is revoked. Raises WireError for what is not a request, IdentityError for one that is not to be trusted.
    """
    request = read(data, Request, where)
    device = check_device(request.device)
    register = folder.register()
    board = register.find("board", device)
    if board is None:
        raise IdentityError("was never added", where=device, remedy="`python -m tools.provision add` gives it a code")
    public_key = _check_request(request, board, where)
    assert board.code is not None
    if board.code.spent:
        assert board.newest is not None
        certificate = folder.issued(board.newest.serial)
        if certificate.public_key() != public_key:
            raise IdentityError("its code was used for another key", where=device, remedy="`add --again` gives another")
        return _answer(folder, device, certificate), f"{device}: signed before, the same answer again"
    if now >= board.code.ends:
        raise IdentityError(
            f"its code ended {board.code.ends:%Y-%m-%d %H:%M} UTC", where=device, remedy="`add --again` gives another"
        )
    authority = folder.authority()
    certificate = authority.client(device, "", public_key, now, life)
    folder.put_issued(certificate)
    superseded = any(one.revoked is None and one.ends > now for one in board.issued)
    spent = msgspec.structs.replace(board.code, spent=True)
    board = board.revoke(now).with_code(spent).with_certificate(_issued(certificate))
    register.put(board)
    folder.put_register(register)
    if superseded:
        _put_revocations(folder, register, authority, now)
    tail = "; what it had before is revoked, give the broker its files anew" if superseded else ""
    return _answer(folder, device, certificate), f"{device}: signed until {_issued(certificate).ends:%Y-%m-%d}{tail}"


def _check_request(request: Request, board: Member, where: str) -> ec.EllipticCurvePublicKey:
    try:
        csr = x509.load_pem_x509_csr(request.csr.encode())
        public_key = csr.public_key()
    except ValueError as error:
        raise WireError(f"its `csr` is none: {error}", where=where) from None
    if not isinstance(public_key, ec.EllipticCurvePublicKey) or not isinstance(public_key.curve, ec.SECP256R1):
        raise IdentityError("its key is not ECDSA P-256", where=where)
    names = [str(name.value) for name in csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if not csr.is_signature_valid or names != [request.device]:
        raise IdentityError("it is not signed by its own key under its own name", where=where)
    if board.code is None:
        raise IdentityError("has no code", where=board.name, remedy="`add --again` gives it one")
    if not hmac.compare_digest(proof(bytes.fromhex(board.code.key), csr), request.proof.lower()):
        raise IdentityError(
            "the request was not made with this board's code",
            where=board.name,
            remedy="Make it again with the newest code; if it was right, somebody else asked",
        )
    return public_key


def renew(
    folder: Folder, names: Sequence[str], now: datetime, life: timedelta, *, force: bool = False
) -> tuple[dict[str, bytes], list[str]]:
    """({board: answer file}, what happened) for `names`, or all that are due. The key stays, so nothing has to come
    from the board. Raises MissingError, IdentityError for a board that is revoked or was never enrolled.
    """
    register = folder.register()
    authority = folder.authority()
    wanted = list(names) or [board.name for board in register.boards() if board.state(now) == "due"]
    answers, said = {}, []
    for name in wanted:
        board = _find(register, name)
        state, newest = board.state(now), board.newest
        if newest is None or state == "revoked":
            raise IdentityError(f"is {state}", where=name, remedy="`add --again` gives it a code, to enrol with")
        certificate = folder.issued(newest.serial)
        if state == "enrolled" and not force:
            said.append(f"{name}: good until {newest.ends:%Y-%m-%d}")
        else:
            public_key = certificate.public_key()
            assert isinstance(public_key, ec.EllipticCurvePublicKey)
            certificate = authority.client(name, "", public_key, now, life)
            folder.put_issued(certificate)
            register.put(board.with_certificate(_issued(certificate)))
            said.append(f"{name}: renewed until {_issued(certificate).ends:%Y-%m-%d}")
        answers[name] = _answer(folder, name, certificate)
    folder.put_register(register)
    return answers, said


def revoke(folder: Folder, role: Role, name: str, now: datetime) -> str:
    """Raises MissingError."""
    register = folder.register()
    member = _find(register, name, role)
    after = member.revoke(now)
    if after == member:
        return f"{name}: nothing of it is good any more"
    register.put(after)
    folder.put_register(register)
    _put_revocations(folder, register, folder.authority(), now)
    return f"{name}: revoked; give the broker its files anew"


def issue(folder: Folder, role: Role, name: str, out: Path, now: datetime, life: timedelta) -> str:
    """A verifier's or operator's key, certificate and authority in `out`, and for a verifier the share's secret. What
    is there and good stays. Raises WireError for a bad name, IdentityError for a key there that is no key.
    """
    check_name(name, role)
    register = folder.register()
    member = register.find(role, name) or Member(role, name)
    key = _key_at(folder, out / "key.pem")
    if member.state(now) == "enrolled" and member.newest:
        certificate = folder.issued(member.newest.serial)
        if certificate.public_key() == key.public_key():
            _put_identity(folder, register, role, out, certificate)
            return f"{role} {name}: good until {member.newest.ends:%Y-%m-%d}"
    certificate = folder.authority().client(role, name, key.public_key(), now, life)
    folder.put_issued(certificate)
    register.put(member.with_certificate(_issued(certificate)))
    folder.put_register(register)
    _put_identity(folder, register, role, out, certificate)
    return f"{role} {name}: signed until {_issued(certificate).ends:%Y-%m-%d}"


def _put_identity(folder: Folder, register: Register, role: Role, out: Path, certificate: x509.Certificate) -> None:
    folder.put(out / "cert.pem", pem(certificate))
    folder.put(out / "ca.pem", folder.read(folder.path / CERTIFICATE))
    if role == "verifier":
        folder.put(out / "share", register.share + "\n", PRIVATE)


def access(folder: Folder, now: datetime) -> str:
    """The broker's access list."""
    return access_list(folder.register().barred(now))


def broker(
    folder: Folder,
    out: Path,
    hosts: Sequence[str],
    now: datetime,
    life: timedelta,
    *,
    at: PurePath,
    state: PurePath,
    ports: Sequence[int],
    websockets_port: int | None,
    connections: int,
) -> str:
    """All that a broker reads, in `out`; see `tools.provision.broker.configuration`. Its certificate is made anew where
    the hosts are others, or it is due. Raises IdentityError for a key there that is no key.
    """
    register = folder.register()
    authority = folder.authority()
    key = _key_at(folder, out / "broker.key")
    member = register.find("broker", hosts[0]) or Member("broker", hosts[0])
    certificate = None
    if member.state(now) == "enrolled" and member.newest:
        certificate = folder.issued(member.newest.serial)
        wanted = {str(general_name(host).value) for host in hosts}
        if certificate.public_key() != key.public_key() or hosts_of(certificate) != wanted:
            certificate = None
    if certificate is None:
        certificate = authority.server(hosts, key.public_key(), now, life)
        folder.put_issued(certificate)
        register.put(member.with_certificate(_issued(certificate)))
        folder.put_register(register)
    folder.put(out / "broker.pem", pem(certificate))
    folder.put(out / "ca.pem", pem(authority.certificate))
    folder.put(out / "crl.pem", _revocations(folder, register, authority, now))
    folder.put(out / "acl", access_list(register.barred(now)), PRIVATE)
    text = configuration(at, ports=ports, websockets_port=websockets_port, state=state, connections=connections)
    folder.put(out / "mosquitto.conf", text)
    return f"{hosts[0]}: good until {_issued(certificate).ends:%Y-%m-%d}"


class Line(msgspec.Struct, frozen=True):
    """One of the inventory. ends: of the certificate, or of the code that waits for a request."""

    name: str
    role: Role
    state: str
    ends: datetime | None
    serial: str


def inventory(folder: Folder, now: datetime) -> list[Line]:
    """Everybody, boards first, by name."""
    lines = []
    for member in folder.register().members.values():
        newest = member.newest
        ends = newest.ends if newest else (member.code.ends if member.code else None)
        lines.append(Line(member.name, member.role, member.state(now), ends, newest.serial if newest else ""))
    return sorted(lines, key=lambda line: (line.role, line.name))


def _find(register: Register, name: str, role: Role = "board") -> Member:
    member = register.find(role, name)
    if member is None:
        raise MissingError(f"no {role} {name!r}", remedy="`inventory` lists all; a board is `tenant.board`")
    return member


def _issued(certificate: x509.Certificate) -> Issued:
    return Issued(serial=f"{certificate.serial_number:x}", ends=certificate.not_valid_after_utc)


def _answer(folder: Folder, device: str, certificate: x509.Certificate) -> bytes:
    chain = folder.read(folder.path / CERTIFICATE).decode()
    answer = Answer(version=VERSION, device=device, certificate=pem(certificate), chain=chain)
    return msgspec.json.format(msgspec.json.encode(answer)) + b"\n"


def _key_at(folder: Folder, path: Path) -> ec.EllipticCurvePrivateKey:
    if path.exists():
        return read_key(folder.read(path), str(path))
    key = ec.generate_private_key(ec.SECP256R1())
    folder.put(path, key_bytes(key), PRIVATE)
    return key


def _put_revocations(folder: Folder, register: Register, authority: Authority, now: datetime) -> None:
    folder.put(folder.path / REVOCATIONS, authority.revocations(register.revoked(now), now))


def _revocations(folder: Folder, register: Register, authority: Authority, now: datetime) -> bytes:
    """The list, made anew where half its life is over: a broker whose list has ended lets nobody in."""
    data = folder.read(folder.path / REVOCATIONS)
    ends = x509.load_pem_x509_crl(data).next_update_utc
    if ends is not None and ends - now > LIST_LIFE / 2:
        return data
    data = authority.revocations(register.revoked(now), now)
    folder.put(folder.path / REVOCATIONS, data)
    return data
