"""The decoder under bytes of any kind, and under arrays that are nearly messages."""

from __future__ import annotations

import msgspec

from protocol.errors import WireError
from protocol.messages import (
    MAX_DRAFT_IDS,
    TAGS,
    Close,
    Commit,
    DeviceState,
    Draft,
    Error,
    Limits,
    Open,
    Opened,
    Resync,
    VerifierState,
    decode,
    encode,
    open_key,
)
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.fuzz.choices import Choices

LIMITS = Limits(48, 64, 8192, 49152)
MESSAGES = (  # one of each kind, with all its fields
    Open(
        1 << 63,
        2,
        "t-1",
        4,
        Ids((1, 300, 7)),
        Sampling(temperature=0.8, top_k=5, top_p=0.9, seed=3),
        256,
        (2, 0),
        None,
        (9, 4),
    ),
    Opened(5, 2, "v1", 7, 131, LIMITS, 60_000, 250),
    Draft(7, 2, 255, 131, 0xDEADBEEF, Ids((1, 300, 5)), 1, Ids((1, 2, 2))),
    Commit(7, 2, 131, 0xDEADBEEF, Ids((1, 300)), 3, 12, "stop", 61_000, 24, 75),
    Resync(7, 2, 131, 1, True, True),
    Close(5, 2, "done"),
    Error(5, 2, "no-room", "all taken", 2000, 7),
    DeviceState("online", "0.1", "d", "0" * 64, "1" * 64, "cpu", 3),
    VerifierState("v1", "up", "t-1", "m", "1" * 64, "fast", "0.1", LIMITS, 3, 60_000),
)
SEEDS = tuple(encode(message) for message in MESSAGES)
FIELDS = tuple(msgspec.msgpack.decode(seed) for seed in SEEDS)
ODD = (  # in place of a field
    None,
    True,
    -1,
    0,
    1,
    0x7F,
    0xFF,
    0x100,
    0xFFFF,
    0x10000,
    1 << 24,
    (1 << 24) + 1,
    1 << 31,
    (1 << 31) + 1,
    1 << 32,
    (1 << 64) - 1,
    0.0,
    1.5,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "v",
    "v/w",
    "v\n",
    "x" * 65,
    "stop",
    "a" * 64,
    "\0",
    b"",
    b"\x05",
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\x08",
    b"\x80",
    b"\x80\x00",
    b"\x01" * 256,
    b"\x01" * 257,
    [],
    [1],
    [1, 2],
    [0] * 65,
    [[1]],
    {},
    {"temperature": 0.5},
    {"temperature": -1},
    {"temperature": 16, "top_p": 1, "top_k": 0, "seed": (1 << 64) - 1},
    {"top_p": 0},
    {"seed": -1},
    {"min_p": 0.1},
    {1: 2},
    msgspec.msgpack.Ext(1, b"x"),
)


def fuzz(data: bytes) -> None:
    """Bytes as they are; and, where the first is one that begins no message, as changes to the fields of one."""
    check(data)
    if data[:1] and data[0] < len(MESSAGES):
        check(nearly(Choices(data)))


def check(payload: bytes) -> None:
    """Decoding raises WireError, or gives a message that comes back equal when it is encoded and decoded again."""
    try:
        message = decode(payload)
    except WireError:
        open_key(payload)
        return
    if isinstance(message, Draft):
        assert 1 <= len(message.ids) <= MAX_DRAFT_IDS and message.have >= 0
    if isinstance(message, Open):
        assert 1 <= message.prompt_len <= message.length
    assert 0 <= getattr(message, "session", 0) < 1 << 64
    again = encode(message)
    assert decode(again) == message, f"{message} came back as {decode(again)}"
    assert type(message) is type(decode(again)) and encode(decode(again)) == again


def nearly(choices: Choices) -> bytes:
    """A message of which some fields are odd, missing or too many."""
    below = choices.below
    fields = list(FIELDS[below(len(FIELDS))])
    while choices.left:
        place = below(len(fields) + 1)
        match below(8):
            case 0:
                del fields[place:]
                if not fields:
                    break
            case 1:
                fields[place:place] = [ODD[below(len(ODD))]]
            case 2:
                fields[0] = TAGS + below(32) if below(2) else below(256)
            case 3:
                other = FIELDS[below(len(FIELDS))]
                fields[place : place + 1] = [other[below(len(other))]]
            case 4:
                fields[place : place + 1] = [bytes(choices.several(8, 256))]
            case 5:
                fields[place : place + 1] = [below(256) << below(64)]
            case _:
                fields[place : place + 1] = [ODD[below(len(ODD))]]
    try:
        return msgspec.msgpack.encode(fields)
    except OverflowError:  # over 64 bits: MessagePack has no such number
        return b""
