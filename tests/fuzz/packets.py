"""The link's reader of packets under bytes of any kind, beside a slow reader made from the standard's text."""

from __future__ import annotations

from link.packets import publish_packet, read_publish

SEEDS = (
    publish_packet("a/b", b"xyz"),
    publish_packet("outrider/v1/a.b/verdict", b"x" * 8, alias=3),
    publish_packet("", b"x", alias=258),
    publish_packet("a", b"", retain=True, expiry_s=60),
    publish_packet("a", bytes(200), alias=1),
    bytes.fromhex("3208000161000100 7879"),
    bytes.fromhex("40020001"),
    bytes.fromhex("30070001610201 0178"),
    bytes.fromhex("300500 02c32800"),
    bytes.fromhex("30ffffff7f"),
    publish_packet("", b"a", alias=2) + publish_packet("t", b"b"),
)


def fuzz(data: bytes) -> None:
    """One packet after the other, as the link reads them, until one that another has to read."""
    at = 0
    while True:
        found = read_publish(data, at)
        assert found == expected(data, at), f"{found}, by the standard {expected(data, at)}"
        if found is None:
            return
        topic, alias, payload, stop = found
        assert at < stop <= len(data)
        assert read_publish(data[at:stop], 0) == (topic, alias, payload, stop - at), "what follows has an influence"
        assert read_publish(data[: stop - 1], at) is None, "a packet was read that is not whole"
        made = publish_packet(topic, payload, alias=alias)
        assert read_publish(made, 0) == (topic, alias, payload, len(made))
        at = stop


def expected(data: bytes, at: int) -> tuple[str, int | None, bytes, int] | None:
    """MQTT 5, 3.3, word by word: each part is cut off the front of what is left."""
    left = data[at:]
    if not left or left[0] >> 4 != 3 or left[0] >> 1 & 3:
        return None
    try:
        length, left = _number(left[1:])
        if len(left) < length:
            return None
        stop = len(data) - len(left) + length
        left = left[:length]
        name, left = _cut(left[2:], int.from_bytes(_cut(left, 2)[0], "big"))
        size, left = left[0], left[1:]  # more bytes than one are of no use to the only property that is read here
        properties, payload = _cut(left, size)
        alias = None
        if properties:
            if properties[0] != 0x23 or len(properties) != 3:
                return None
            alias = int.from_bytes(properties[1:], "big")
        return name.decode(), alias, payload, stop
    except (IndexError, UnicodeDecodeError):
        return None


def _cut(data: bytes, size: int) -> tuple[bytes, bytes]:
    if len(data) < size:
        raise IndexError
    return data[:size], data[size:]


def _number(data: bytes) -> tuple[int, bytes]:
    """A variable byte integer (1.5.5), of more bytes than it needs perhaps, and what follows it."""
    value = 0
    for i in range(4):
        value += (data[i] & 0x7F) * 128**i
        if data[i] < 0x80:
            return value, data[i + 1 :]
    raise IndexError
