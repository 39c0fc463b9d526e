"""Whether a board's clock can be right: one without a battery starts in the past, and TLS then fails in odd ways."""

from __future__ import annotations

import ctypes
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from protocol.errors import ConfigError

TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
TIMEX_BYTES = 512  # more than the 208 of the kernel's struct, whose first field, zero, asks without changing anything
SEQUENCE, UTC_TIME, GENERALIZED_TIME, VERSION = 0x30, 0x17, 0x18, 0xA0


@dataclass(frozen=True, slots=True)
class Validity:
    """When a certificate holds, as UTC."""

    begins: datetime
    ends: datetime


def validity(path: Path) -> Validity:
    """Of the first certificate of a PEM file (RFC 5280, section 4.1). Raises ConfigError where there is none."""
    where, remedy = str(path), "Name a readable PEM file with a certificate"
    try:
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        text = path.read_text(encoding="ascii", errors="replace")
        first = text[text.index(begin) : text.index(end) + len(end)]
        return _validity(ssl.PEM_cert_to_DER_cert(first))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=where, remedy=remedy) from error
    except (ValueError, IndexError) as error:
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


def _validity(der: bytes) -> Validity:
    certificate, _ = _open(der, SEQUENCE)
    inner, _ = _open(certificate, SEQUENCE)
    if inner[0] == VERSION:
        inner = _skip(inner)
    for _ in range(3):  # serial number, signature algorithm, issuer
        inner = _skip(inner)
    dates, _ = _open(inner, SEQUENCE)
    begins, ends = _time(dates), _time(_skip(dates))
    return Validity(begins, ends)


def _header(der: bytes) -> tuple[int, int]:
    """(bytes of the tag and length, bytes of the value) of the element that `der` begins with."""
    first = der[1]
    if first < 0x80:
        return 2, first
    num = first & 0x7F
    return 2 + num, int.from_bytes(der[2 : 2 + num], "big")


def _open(der: bytes, tag: int) -> tuple[bytes, int]:
    """(value, tag) of the first element, which must have this tag; 0 for any."""
    header, length = _header(der)
    if (tag and der[0] != tag) or header + length > len(der):
        raise ValueError(f"tag {der[0]:#x} of {length} bytes in {len(der)}")
    return der[header : header + length], der[0]


def _skip(der: bytes) -> bytes:
    header, length = _header(der)
    return der[header + length :]


def _time(der: bytes) -> datetime:
    value, tag = _open(der, 0)
    if tag == UTC_TIME:  # two digits of the year: 50 to 99 are of the last century (RFC 5280, 4.1.2.5.1)
        value = (b"19" if value[:2] >= b"50" else b"20") + value
    elif tag != GENERALIZED_TIME:
        raise ValueError(f"tag {tag:#x} is no time")
    return datetime.strptime(value.decode("ascii"), "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
