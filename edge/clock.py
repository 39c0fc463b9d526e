"""Whether a board's clock can be right: one without a battery starts in the past, and TLS then fails in odd ways."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from protocol.errors import ConfigError

TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
TIMEX_BYTES = 512  # more than the 208 of the kernel's struct, whose first field, zero, asks without changing anything


@dataclass(frozen=True, slots=True)
class Validity:
    """When a certificate holds, as UTC."""

    begins: datetime
    ends: datetime


def validity(path: Path) -> Validity:
    """Of the first certificate of a PEM file. Raises ConfigError where there is none."""
    from cryptography import x509  # only `check` asks: a board starts without it

    where, remedy = str(path), "Name a readable PEM file with a certificate"
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=where, remedy=remedy) from error
    except ValueError as error:
        raise ConfigError("holds no certificate that can be read", where=where, remedy=remedy) from error


def synchronised() -> bool | None:
    """Whether something like NTP keeps this machine's clock, by the kernel's account; None where it does not tell."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != TIME_ERROR


def newest(*paths: Path) -> datetime:
    """When the youngest of these files was written: no right clock is before that. Raises OSError."""
    return datetime.fromtimestamp(max(path.stat().st_mtime for path in paths), timezone.utc)
