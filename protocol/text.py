"""Texts as both sides name them: packed token ids and the hash of everything before a position."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from protocol.errors import WireError

MAX_ID = (1 << 31) - 1


class Ids(tuple[int, ...]):
    """Token ids, travelling as a byte string of LEB128 numbers: two bytes for the frequent ids of a BPE vocabulary."""

    __slots__ = ()


def pack(ids: Iterable[int]) -> bytes:
    """LEB128, unsigned, least significant group first. Raises WireError for an id outside 0..2^31-1."""
    out = bytearray()
    for i in ids:
        if not 0 <= i <= MAX_ID:
            raise WireError(f"token id {i} is not in 0..{MAX_ID}")
        while i > 0x7F:
            out.append(i & 0x7F | 0x80)
            i >>= 7
        out.append(i)
    return bytes(out)


def unpack(data: bytes) -> Ids:
    """The inverse of `pack`. Raises WireError for a number that is cut off, overlong or above 2^31-1."""
    ids: list[int] = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            if shift > 28:
                raise WireError(f"packed id {len(ids)} is longer than 31 bits")
            continue
        if value > MAX_ID or (byte == 0 and shift):
            raise WireError(f"packed id {len(ids)} is not in canonical form")
        ids.append(value)
        value = shift = 0
    if shift:
        raise WireError("packed ids end within a number")
    return Ids(ids)


def owner_hash(session: int, verifier: str, epoch: int) -> int:
    """The hash of an empty text in the hands of one owner, so that no other owner's hash can ever match."""
    return zlib.crc32(f"{session:016x}/{verifier}/{epoch}".encode())


def extend_hash(before: int, token: int) -> int:
    """The hash of a text with one more token: CRC-32 over the ids as 32-bit little-endian words."""
    return zlib.crc32(token.to_bytes(4, "little"), before)


def prefix_hashes(seed: int, ids: Sequence[int]) -> list[int]:
    """[len(ids) + 1] hashes: of the empty text, of the first token, ... of all of `ids`."""
    hashes = [seed]
    for token in ids:
        hashes.append(extend_hash(hashes[-1], token))
    return hashes
