"""A board's identity: its key is made here and never leaves; what travels is a request, and an answer that is public.

The request is signed by the key and proves knowledge of the one-time code that `python -m tools.provision add` gave out
for this board: an HMAC-SHA256 of the request under a key that is derived from code and name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from link.config import TlsConfig
from protocol.errors import ConfigError, OutriderError, WireError
from protocol.topics import check_device

VERSION = 1
PRIVATE, PUBLIC = 0o600, 0o644

T = TypeVar("T")


class IdentityError(OutriderError):
    """A key, certificate or code that does not prove what it should; exits with EX_NOPERM."""

    exit_code = 77


class FileError(OutriderError):
    """A file that cannot be read or written; exits with EX_IOERR."""

    exit_code = 74


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a board sends to its authority. csr: PEM; proof: hexadecimal, see `proof`."""

    version: int
    device: str
    csr: str
    proof: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes back. certificate, chain: PEM; the chain is what the board trusts the broker by."""

    version: int
    device: str
    certificate: str
    chain: str


def code_key(device: str, code: str) -> bytes:
    """The secret that code and name stand for, 32 bytes. Case, spaces and hyphens of the code do not matter, and what
    is easily misread counts as what it was (O is 0, I and L are 1).
    """
    plain = "".join(code.upper().split()).replace("-", "").translate(str.maketrans("OIL", "011"))
    return hashlib.sha256(f"outrider enrolment\n{device}\n{plain}".encode()).digest()


def proof(key: bytes, csr: x509.CertificateSigningRequest) -> str:
    """HMAC-SHA256 of the request's DER bytes under `code_key`."""
    return hmac.new(key, csr.public_bytes(serialization.Encoding.DER), hashlib.sha256).hexdigest()


def make_request(device: str, key: ec.EllipticCurvePrivateKey, code: str) -> bytes:
    """The request file. Raises WireError for a name that is not a device's, IdentityError for an empty code."""
    check_device(device)
    if not code.strip():
        raise IdentityError("no enrolment code", where=device, remedy="It is what `tools.provision add` printed")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    pem = csr.public_bytes(serialization.Encoding.PEM).decode()
    request = Request(version=VERSION, device=device, csr=pem, proof=proof(code_key(device, code), csr))
    return msgspec.json.format(msgspec.json.encode(request)) + b"\n"


def read(data: bytes, kind: type[T], where: str) -> T:
    """A request or an answer from its file's bytes. Raises WireError."""
    try:
        message = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"is not {_a(kind)}: {error}", where=where) from None
    if (version := getattr(message, "version", None)) != VERSION:
        raise WireError(f"version {version} is not {VERSION}", where=where, remedy="Both sides need the same release")
    return message


def _a(kind: type) -> str:
    return "an answer" if kind is Answer else "a request for a certificate"


def board_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key at `path`; made there, readable by its owner alone, where there is none.

    Raises FileError, or IdentityError for a file that is not an ECDSA P-256 key.
    """
    try:
        return read_key(path.read_bytes(), str(path))
    except FileNotFoundError:
        key = ec.generate_private_key(ec.SECP256R1())
        write_file(path, key_bytes(key), PRIVATE)
        return key
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", where=str(path)) from None


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PKCS 8, PEM, not encrypted: a board starts without anybody beside it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(data: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Raises IdentityError."""
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise IdentityError("is not a private key in PEM", where=where, remedy="Move it away to make anew") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("is not an ECDSA P-256 key", where=where, remedy="Move it away to make one anew")
    return key


def check_answer(answer: Answer, device: str, key: ec.EllipticCurvePrivateKey, now: datetime) -> datetime:
    """When the answer's certificate ends, if this board can use it.

    Raises IdentityError where it is another board's, another key's or not of its own chain, and where the board's clock
    stands outside of its dates: a board without a battery starts in the past, and no TLS connection succeeds there.
    """
    try:
        certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
        issuer = x509.load_pem_x509_certificate(answer.chain.encode())
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise IdentityError("the certificate is not one of the authority that came with it", where=device) from None
    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [device] or answer.device != device:
        raise IdentityError(
            f"the certificate is for {', '.join(names) or 'nobody'}, this board is {device}",
            remedy="Take the answer to the board that asked, or correct `name` in [device]",
        )
    if certificate.public_key() != key.public_key():
        raise IdentityError(
            "the certificate is for another key than this board's",
            where=device,
            remedy="Ask again: the key was replaced after the request",
        )
    check_dates(certificate, now, device)
    return certificate.not_valid_after_utc


def check_dates(certificate: x509.Certificate, now: datetime, where: str) -> None:
    """Raises IdentityError where `now` is outside of the certificate's dates, and says what the clock shows."""
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < starts:
        raise IdentityError(
            f"the clock says {now:%Y-%m-%d %H:%M} UTC, the certificate begins {starts:%Y-%m-%d %H:%M}",
            where=where,
            remedy="The clock is wrong: set it, and let a time service keep it",
        )
    if now > ends:
        raise IdentityError(
            f"the certificate ended {ends:%Y-%m-%d %H:%M}, the clock says {now:%Y-%m-%d %H:%M} UTC",
            where=where,
            remedy="Renew it with `tools.provision renew`, unless the clock is wrong",
        )


def identity_paths(tls: TlsConfig | None) -> tuple[Path, Path, Path]:
    """(authority, certificate, key) of the configuration. Raises ConfigError where it does not name all three."""
    if tls is None or tls.ca is None or tls.cert is None or tls.key is None:
        raise ConfigError(
            "there is no place for this board's identity",
            where="[broker.tls]",
            remedy='Name its three files: `ca = "ca.pem"`, `cert = "board.pem"`, `key = "board.key"`',
        )
    return tls.ca, tls.cert, tls.key


def request(device: str, tls: TlsConfig | None, code: str) -> bytes:
    """Make the board's key, where there is none; returns its request."""
    _, _, key_path = identity_paths(tls)
    return make_request(device, board_key(key_path), code)


def install(device: str, tls: TlsConfig | None, data: bytes, where: str) -> datetime:
    """Put certificate and authority of an answer where the configuration wants them, all checks passed first; returns
    the end. where: names the answer in errors.
    """
    ca, cert, key_path = identity_paths(tls)
    key = read_key(read_file(key_path), str(key_path))
    answer = read(data, Answer, where)
    ends = check_answer(answer, device, key, datetime.now(timezone.utc))
    write_file(ca, answer.chain.encode(), PUBLIC)
    write_file(cert, answer.certificate.encode(), PUBLIC)
    return ends


def read_file(path: Path) -> bytes:
    """Raises FileError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", where=str(path)) from None


def write_file(path: Path, data: bytes, mode: int) -> None:
    """The whole file or none of it, also where the power goes. What root writes belongs to whom the folder belongs: the
    service has to read a key that an administrator made. Raises FileError.
    """
    try:
        _make_folder(path.parent)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(handle, mode)
                if os.geteuid() == 0:
                    above = path.parent.stat()
                    os.fchown(handle, above.st_uid, above.st_gid)
                os.fsync(handle)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _make_folder(path: Path) -> None:
    """With those above it; each new one belongs to whom the one above it belongs. Raises OSError."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        above = path.parent.stat()
        os.chown(path, above.st_uid, above.st_gid)
