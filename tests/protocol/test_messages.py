"""The wire format is frozen by golden bytes; whatever else arrives raises the documented error and nothing else."""

from __future__ import annotations

import random

import msgspec
import pytest

from protocol.errors import WireError
from protocol.messages import (
    MAX_DRAFT_IDS,
    MAX_PAYLOAD,
    Announcement,
    Close,
    Commit,
    DeviceState,
    Draft,
    Error,
    Health,
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

LIMITS = Limits(48, 64, 8192, 49152)

GOLDEN = {
    "open": (
        Open(
            0x0123456789ABCDEF,
            2,
            "smollm2-135m-0123456789ab",
            3,
            Ids((1, 300, 49151, 7)),
            Sampling(temperature=0.8, top_p=0.95, seed=2**64 - 1),
            256,
            (2, 0),
            None,
        ),
        "9a11cf0123456789abcdef02b9736d6f6c6c6d322d3133356d2d30313233343536373839616203c40701ac02ffff020783"
        "ab74656d7065726174757265cb3fe999999999999aa5746f705f70cb3fee666666666666a473656564cfffffffffffffffff"
        "cd0100920200c0",
    ),
    "open, defaults": (
        Open(5, 0, "t", 1, Ids((9,)), Sampling(), 16),
        "98110500a17401c401098010",
    ),
    "opened": (
        Opened(0x0123456789ABCDEF, 2, "v1a2b3c4d5", 7, 131, LIMITS, 60_000, 250),
        "9912cf0123456789abcdef02aa7631613262336334643507cc8395304 0cd2000cdc000c3cdea60ccfa".replace(" ", ""),
    ),
    "draft, chain": (
        Draft(7, 2, 255, 131, 0xDEADBEEF, Ids((1, 300, 49151)), 1),
        "98130702ccffcc83cedeadbeefc40601ac02ffff0201",
    ),
    "draft, tree": (
        Draft(7, 2, 3, 131, 0xDEADBEEF, Ids((1, 300, 5)), 0, Ids((1, 2, 2))),
        "9913070203cc83cedeadbeefc40401ac020500c403010202",
    ),
    "commit, short": (
        Commit(7, 2, 131, 0xDEADBEEF, Ids((1, 300)), 3),
        "97140702cc83cedeadbeefc40301ac0203",
    ),
    "commit, long": (
        Commit(7, 2, 131, 0xDEADBEEF, Ids(), 3, 12, "stop", 61_000, 24),
        "9b140702cc83cedeadbeefc400030ca473746f70cdee4818",
    ),
    "commit, aged": (
        Commit(7, 2, 131, 0xDEADBEEF, Ids((5,)), 3, age_ms=75),
        "9c140702cc83cedeadbeefc4010503" + "00a0c0c04b",
    ),
    "resync": (Resync(7, 2, 131, 1), "95150702cc8301"),
    "resync, ask alone": (Resync(7, 2, 131, 1, True, True), "97150702cc8301c3c3"),
    "close": (Close(5, 2, "done"), "94160502a4646f6e65"),
    "error": (
        Error(5, 2, "no-room", "all 64 sessions are taken", 2000),
        "96170502a76e6f2d726f6f6db9616c6c2036342073657373696f6e73206172652074616b656ecd07d0",
    ),
    "error, by handle": (
        Error(0, 2, "unknown-session", "", None, 7),
        "97170002af756e6b6e6f776e2d73657373696f6ea0c007",
    ),
    "device state": (DeviceState("offline"), "9218a76f66666c696e65"),
    "device state, with health": (
        DeviceState("online", health=Health(25, 0x50005, 82, 900, "25W", "Raspberry Pi 5")),
        "9918a66f6e6c696e65a0a0a0a0a0009619ce0005000552cd0384a3323557ae5261737062657272792050692035",
    ),
    "announcement": (Announcement(b"{}", bytes(64)), "931ac4027b7dc440" + "00" * 64),
    "verifier state": (
        VerifierState("v1", "up", "t-1", "m", "", "fast-float32", "0.1.0", LIMITS, 3, 60_000),
        "9b19a27631a27570a3742d31a16da0ac666173742d666c6f61743332a5302e312e309530 40cd2000cdc000c303cdea60".replace(
            " ", ""
        ),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    message, golden = GOLDEN[name]
    assert encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


def test_an_older_side_skips_fields_that_it_does_not_know():
    fields = msgspec.msgpack.decode(encode(GOLDEN["commit, aged"][0]))
    assert decode(msgspec.msgpack.encode([*fields, "new", 7])) == GOLDEN["commit, aged"][0]


def test_a_newer_side_fills_in_fields_that_are_missing():
    assert decode(msgspec.msgpack.encode([0x14, 7, 2, 131, 1, b"\x05"])) == Commit(7, 2, 131, 1, Ids((5,)))


def test_an_unknown_sampling_parameter_is_refused_by_name():
    payload = msgspec.msgpack.encode([0x11, 5, 3, "t", 1, b"\x09", {"temperature": 0.5, "min_p": 0.1}, 16])
    with pytest.raises(WireError, match="min_p"):
        decode(payload)
    assert open_key(payload) == (5, 3)


@pytest.mark.parametrize(
    "fields",
    [
        [0x13, 7, 2, 3, 131, 1, b""],
        [0x13, 7, 2, 3, 131, 1, b"\x05", 132],
        [0x13, 7, 2, 3, 131, 1, b"\x85"],
        [0x13, 7, 2, 3, 131, 1, b"\xff\xff\xff\xff\x7f"],
        [0x13, 7, 2, 3, 131, 1, b"\x05" * (MAX_DRAFT_IDS + 1)],
        [0x13, 7, 2, 3, 131, 1, [5]],
        [0x13, 70000, 2, 3, 131, 1, b"\x05"],
        [0x13, 7, 2, 256, 131, 1, b"\x05"],
        [0x13, 7, 2, 3, -1, 1, b"\x05"],
        [0x13, 7, 2, 3, 131, 1 << 32, b"\x05"],
        [0x11, 5, 0, "t", 2, b"\x09", {}, 16],
        [0x11, 5, 0, "t", 0, b"\x09", {}, 16],
        [0x11, 5, 0, "a/b", 1, b"\x09", {}, 16],
        [0x11, 5, 0, "t", 1, b"\x09", {"temperature": -1}, 16],
        [0x11, 5, 0, "t", 1, b"\x09", {"top_p": 0}, 16],
        [0x1A, b"{}", bytes(63)],
        [0x1A, bytes(1 << 17), bytes(64)],
        [0x1A, "{}", bytes(64)],
        [99, 1],
        [],
        7,
    ],
)
def test_what_is_outside_the_limits_is_refused(fields):
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(fields))


def test_another_version_is_refused_and_says_what_to_do():
    with pytest.raises(WireError, match=r"version 2 is not 1.*older side"):
        decode(encode(GOLDEN["resync"][0]).replace(b"\x15", b"\x25", 1))
    with pytest.raises(WireError):
        decode(b"")


def test_a_payload_over_the_limit_is_refused_on_both_sides():
    with pytest.raises(WireError, match="over the limit"):
        encode(Open(5, 0, "t", 1, Ids([70_000] * (MAX_PAYLOAD // 3 + 1)), Sampling(), 16))
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes(MAX_PAYLOAD + 1))


def test_100_000_mutated_payloads_raise_nothing_but_the_documented_error():
    rng = random.Random(1)
    payloads = [encode(message) for message, _ in GOLDEN.values()]
    refused = 0
    for _ in range(100_000):
        data = bytearray(rng.choice(payloads))
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            match rng.randrange(4):
                case 0:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case 1:
                    data.insert(rng.randrange(len(data) + 1), rng.randrange(256))
                case 2 if len(data) > 1:
                    del data[rng.randrange(len(data))]
                case _:
                    del data[rng.randrange(len(data)) + 1 :]
        try:
            decode(bytes(data))
        except WireError:
            refused += 1
        open_key(bytes(data))
    assert refused > 50_000
