"""The authority's folder: changes are gathered, then written, or only listed where this is a rehearsal."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cryptography import x509

from edge.enroll import PRIVATE, PUBLIC, FileError, IdentityError, read_key, write_file
from protocol.errors import OutriderError
from tools.provision.authority import Authority, pem
from tools.provision.register import Register

KEY, CERTIFICATE, REGISTER, REVOCATIONS = "ca.key", "ca.pem", "register.json", "crl.pem"


class MissingError(OutriderError):
    """An authority, member or file that is not there; exits with EX_NOINPUT."""

    exit_code = 66


class ExistsError(OutriderError):
    """Something else stands where this would be made; exits with EX_CANTCREAT."""

    exit_code = 73


class Folder:
    """What is `put` waits until `finish`. path: of the folder; rehearsing: whether nothing is to be written at all."""

    def __init__(self, path: Path) -> None:
        self.path, self.rehearsing = path, False
        self._pending: dict[Path, tuple[bytes, int]] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """One change at a time. Raises FileError."""
        if self.rehearsing:
            yield
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, PRIVATE)
        except OSError as error:
            raise FileError(f"cannot be used: {error.strerror}", where=str(self.path)) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def is_made(self) -> bool:
        return (self.path / REGISTER).exists()

    def register(self) -> Register:
        """Raises MissingError, FileError."""
        data = self.read(self.path / REGISTER, "Make an authority with `python -m tools.provision init`")
        try:
            return msgspec.json.decode(data, type=Register)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FileError(f"is damaged: {error}", where=str(self.path / REGISTER), remedy="Restore a copy") from None

    def authority(self) -> Authority:
        """Raises MissingError, FileError, IdentityError."""
        key = read_key(self.read(self.path / KEY), str(self.path / KEY))
        certificate = self.certificate(self.path / CERTIFICATE)
        if certificate.public_key() != key.public_key():
            raise IdentityError(f"is not the key of {CERTIFICATE}", where=str(self.path / KEY), remedy="Restore a copy")
        return Authority(key, certificate)

    def issued(self, serial: str) -> x509.Certificate:
        return self.certificate(self._issued(serial))

    def certificate(self, path: Path) -> x509.Certificate:
        """Raises MissingError, FileError."""
        try:
            return x509.load_pem_x509_certificate(self.read(path))
        except ValueError:
            raise FileError("is not a certificate in PEM", where=str(path)) from None

    @staticmethod
    def read(path: Path, remedy: str = "") -> bytes:
        """Raises MissingError, FileError."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise MissingError("no such file", where=str(path), remedy=remedy) from None
        except OSError as error:
            raise FileError(f"cannot be read: {error.strerror}", where=str(path)) from None

    def put(self, path: Path, data: str | bytes, mode: int = PUBLIC) -> None:
        """To be written, in this order, where the file does not hold it already."""
        content = data.encode() if isinstance(data, str) else data
        try:
            same = path.read_bytes() == content and path.stat().st_mode & 0o777 == mode
        except OSError:
            same = False
        if not same:
            self._pending[path] = content, mode

    def put_issued(self, certificate: x509.Certificate) -> str:
        """Returns the serial."""
        serial = f"{certificate.serial_number:x}"
        self.put(self._issued(serial), pem(certificate))
        return serial

    def put_register(self, register: Register) -> None:
        self.put(self.path / REGISTER, msgspec.json.format(msgspec.json.encode(register)) + b"\n", PRIVATE)

    def finish(self) -> list[Path]:
        """Write what waits, or do not where this is a rehearsal; returns what it was. Raises FileError; what was
        written before it stays, and a second run goes on from there.
        """
        pending, self._pending = self._pending, {}
        if not self.rehearsing:
            for path, (data, mode) in pending.items():
                write_file(path, data, mode)
        return list(pending)

    def _issued(self, serial: str) -> Path:
        return self.path / "issued" / f"{serial}.pem"
