"""PUBLISH packets at QoS 0: the bytes of the standard, and never a guess at what is not wholly there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from link.packets import publish_packet, read_publish

SHORT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), max_size=40)


def test_the_bytes_are_those_of_the_standard() -> None:
    """MQTT 5, 3.3: fixed header, topic, properties, payload."""
    assert publish_packet("a/b", b"xyz") == bytes.fromhex("30 09 0003 612f62 00 78797a")
    assert publish_packet("", b"x", alias=258) == bytes.fromhex("30 07 0000 03 230102 78")
    assert publish_packet("a", b"", retain=True, expiry_s=60) == bytes.fromhex("31 09 0001 61 05 020000003c")
    assert publish_packet("a", bytes(200))[:3] == bytes.fromhex("30 cc 01")


@given(SHORT, st.binary(max_size=300), st.none() | st.integers(1, 65535), st.binary(max_size=5))
def test_what_is_made_is_read(topic: str, payload: bytes, alias: int | None, before: bytes) -> None:
    data = before + publish_packet(topic, payload, alias=alias)
    assert read_publish(data + b"0", len(before)) == (topic, alias, payload, len(data))
    for end in range(len(before), len(data)):
        assert read_publish(data[:end], len(before)) is None


@pytest.mark.parametrize(
    "other",
    [
        "32 08 0001 61 0001 00 7879",  # QoS 1
        "40 02 0001",  # PUBACK
        "30 09 0001 61 05 020000003c",  # an expiry
        "30 07 0001 61 02 0101 78",  # a payload format
        "30 05 0002 c328 00",  # a topic that is not UTF-8
        "30 04 0009 61 00",  # a topic longer than the packet
        "30 05 0001 61 09 78",  # properties longer than the packet
        "30 ff ff ff ff 7f",  # a length of five bytes
    ],
)
def test_all_else_is_left_to_another(other: str) -> None:
    assert read_publish(bytes.fromhex(other) + bytes(64), 0) is None
