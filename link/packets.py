"""PUBLISH packets at QoS 0 (pure): the only ones that come by the hundred, so that their making and reading counts.

paho-mqtt builds properties, a reason code and a handle for each message, which takes several times as long.
"""

from __future__ import annotations

import re

from protocol.errors import WireError

PUBLISH, RETAIN, QOS = 0x30, 0x01, 0x06
MESSAGE_EXPIRY, TOPIC_ALIAS = b"\x02", 0x23  # properties: MQTT 5, 2.2.2.2
NO_WILDCARDS = re.compile(r"[^+#\0]*").fullmatch
ALIAS_ALONE = 3  # bytes of the properties when there is a topic alias and nothing else


def check_topic(topic: str) -> str:
    """The topic. Raises WireError for one that cannot be published to."""
    if not topic or len(topic) > 65535 or not NO_WILDCARDS(topic):
        raise WireError(f"cannot publish to topic {topic!r}", where="link")
    return topic


def publish_packet(
    topic: str, payload: bytes, *, retain: bool = False, expiry_s: int | None = None, alias: int | None = None
) -> bytes:
    """A whole packet (MQTT 5, 3.3). expiry_s: seconds that the broker may keep it."""
    name = topic.encode()
    properties = b"" if expiry_s is None else MESSAGE_EXPIRY + expiry_s.to_bytes(4, "big")
    if alias is not None:
        properties += bytes((TOPIC_ALIAS, alias >> 8, alias & 0xFF))
    body = b"".join((len(name).to_bytes(2, "big"), name, bytes((len(properties),)), properties, payload))
    return bytes((PUBLISH | retain, *_length(len(body)))) + body


def read_publish(data: bytes, at: int) -> tuple[str, int | None, bytes, int] | None:
    """(topic, alias, payload, where the packet ends) of the packet that begins at `at`.

    None for all that another has to read: not whole, not a PUBLISH at QoS 0, with other properties than a topic alias,
    or not well formed.
    """
    end = len(data)
    if at + 2 > end or data[at] & (0xF0 | QOS) != PUBLISH:
        return None
    length = shift = 0
    begin = at + 1
    while True:
        if begin == end or shift > 21:
            return None
        byte = data[begin]
        begin += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    stop = begin + length
    named = begin + 2 + int.from_bytes(data[begin : begin + 2], "big")
    if stop > end or named >= stop:
        return None
    alias: int | None = None
    size = data[named]
    if size == ALIAS_ALONE and named + 1 + size <= stop and data[named + 1] == TOPIC_ALIAS:
        alias = int.from_bytes(data[named + 2 : named + 4], "big")
    elif size:
        return None
    try:
        topic = data[begin + 2 : named].decode()
    except UnicodeDecodeError:
        return None
    return topic, alias, data[named + 1 + size : stop], stop


def _length(length: int) -> list[int]:
    """A remaining length as its bytes (MQTT 5, 1.5.5)."""
    found = []
    while length > 0x7F:
        found.append(length & 0x7F | 0x80)
        length >>= 7
    found.append(length)
    return found
