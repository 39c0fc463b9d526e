"""The messages, version 1. Transport takes and gives bytes; this module is all that knows what they mean.

A payload is a MessagePack array: one number for the version and the message's kind, then the fields in order. Fields at
the end that hold their default are left out, new fields are only ever added at the end, and fields beyond those known
are skipped, so that each side may be the older one.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from protocol.errors import OutriderError, WireError
from protocol.sampling import Sampling
from protocol.text import Ids, pack, unpack

VERSION = 1
TAGS = VERSION << 4  # a message's tag is the version in the high bits and its kind in the low ones
MAX_PAYLOAD = 1 << 20  # bytes
MAX_DRAFT_IDS = 256
MAX_COUNT = 1 << 24

SessionId: TypeAlias = Annotated[int, Meta(ge=0)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF)]
Handle: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF)]
Hash: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Seq: TypeAlias = Annotated[int, Meta(ge=0, le=0xFF)]
Position: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Millis: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")]
Prose: TypeAlias = Annotated[str, Meta(max_length=1000)]


class FinishReason:
    """Why a text is complete."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ALL = ("", STOP, LENGTH, CONTEXT)


Finish: TypeAlias = Annotated[str, Meta(pattern=r"^(stop|length|context)?$")]


class ErrorCode:
    """Codes of `Error`. A device treats one that it does not know as final for the session."""

    BAD_MESSAGE = "bad-message"
    BAD_OPEN = "bad-open"
    UNKNOWN_SESSION = "unknown-session"
    UNKNOWN_PREFIX = "unknown-prefix"
    WRONG_TARGET = "wrong-target"
    OVER_CONTEXT = "over-context"
    OVER_LIMIT = "over-limit"
    NO_ROOM = "no-room"
    DRAINING = "draining"
    DIVERGED = "diverged"
    ENGINE = "engine"
    REOPEN = frozenset({UNKNOWN_SESSION, UNKNOWN_PREFIX, DIVERGED, DRAINING, NO_ROOM, ENGINE})
    """Those after which the device opens again with its next epoch."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Root of all messages."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What a verifier accepts. draft_rows: nodes of a session's tree at any time; ahead: tokens that it runs beyond
    what the device says it has; context: tokens; vocab_size: ids; trees: whether a draft may branch.
    """

    draft_rows: Count
    ahead: Count
    context: Count
    vocab_size: Count
    trees: bool = True


class Open(Message, frozen=True, tag=TAGS + 1):
    """A device asks for a session. ids: the prompt and what is already committed; prompt_len: of the prompt alone, in
    tokens, those of the prefix included.

    patience_ms: how long the verifier may hold the session without drafts; 0 never, None for ever.
    prefix: (session, length) of an earlier text of this device, whose first tokens are not sent again: the text is
    these and `ids` behind them. None: `ids` is all.
    """

    session: SessionId
    epoch: Epoch
    target: Name
    prompt_len: Count
    ids: Ids
    sampling: Sampling
    max_tokens: Count
    stop_ids: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    patience_ms: Millis | None = 0
    prefix: tuple[SessionId, Count] | None = None

    @property
    def length(self) -> int:
        """Of the text, in tokens."""
        return len(self.ids) + (self.prefix[1] if self.prefix else 0)


class Opened(Message, frozen=True, tag=TAGS + 2):
    """A verifier took the session. length: of the text that it has; handle: the session's short name from now on."""

    session: SessionId
    epoch: Epoch
    verifier: Name
    handle: Handle
    length: Count
    limits: Limits
    step_us: Count = 0
    patience_ms: Millis | None = 0


class Draft(Message, frozen=True, tag=TAGS + 3):
    """Guesses for the positions from `base` on, grafted where the text before `base` has this hash.

    seq: counts the session's drafts, modulo 256; lead: how far `base` lies beyond what the device has.
    deltas: for each id, how far before it its parent stands in `ids` (i + 1: it is a child of the text itself);
    empty for a chain.
    """

    handle: Handle
    epoch: Epoch
    seq: Seq
    base: Position
    hash: Hash
    ids: Ids
    lead: Count = 0
    deltas: Ids = Ids()

    @property
    def have(self) -> int:
        """Length of the text that the device has."""
        return self.base - self.lead


class Commit(Message, frozen=True, tag=TAGS + 4):
    """Facts: `ids` stand at the positions from `base` on, behind a text with this hash.

    seq, held: the last draft seen, and how many guesses of this session are still held after this commit.
    step_us: time of the verifier's step, where it has changed. advice: draft rows a step that are welcome, likewise.
    age_ms: how long before this commit left the draft `seq` had come, in the first commit that knows of it: what
    remains of the time since it was sent is the round trip.
    """

    handle: Handle
    epoch: Epoch
    base: Position
    hash: Hash
    ids: Ids
    seq: Seq = 0
    held: Count = 0
    finish: Finish = ""
    step_us: Count | None = None
    advice: Count | None = None
    age_ms: Count | None = None


class Resync(Message, frozen=True, tag=TAGS + 5):
    """The device has a text of this length and hash. ask: it wants everything from there on.

    alone: it can draft no further for this text, so that the verifier must not wait for drafts, whatever its patience.
    """

    handle: Handle
    epoch: Epoch
    have: Position
    hash: Hash
    ask: bool = False
    alone: bool = False


class Close(Message, frozen=True, tag=TAGS + 6):
    """The device is done with the session, or with this epoch of it."""

    session: SessionId
    epoch: Epoch
    reason: Prose = ""


class Error(Message, frozen=True, tag=TAGS + 7):
    """The verifier cannot go on with a session. retry_ms: when to try again, where that makes sense.

    session is 0 where the verifier knows no more than the handle that it was sent.
    """

    session: SessionId
    epoch: Epoch
    code: Name
    what: Prose = ""
    retry_ms: Millis | None = None
    handle: Handle | None = None


class Health(msgspec.Struct, frozen=True, array_like=True):
    """How a board is. drafting: per cent of its time that it may draft; throttled: the Pi's bits of `get_throttled`,
    other boards' facts in the same; temperature_c: of the zone nearest to its limit; free_mib: memory.
    """

    drafting: Annotated[int, Meta(ge=0, le=100)] = 100
    throttled: Count = 0
    temperature_c: Annotated[int, Meta(ge=-100, le=200)] | None = None
    free_mib: Count | None = None
    power_mode: Prose = ""
    hardware: Prose = ""


class DeviceState(Message, frozen=True, tag=TAGS + 8):
    """Retained. status: online, offline. Digests are SHA-256 in hex. compute: bits of weights and activations, and on
    what they run; health: None where it is not known; releases: what runs and what is tried.
    """

    status: Name
    version: Prose = ""
    drafter: Prose = ""
    drafter_digest: Digest = ""
    tokenizer_digest: Digest = ""
    compute: Prose = ""
    sessions: Count = 0
    health: Health | None = None
    releases: Prose = ""


class VerifierState(Message, frozen=True, tag=TAGS + 9):
    """Retained. status: up, draining, gone. step_us: of the latest steps, median."""

    verifier: Name
    status: Name
    target: Name = "none"
    model: Prose = ""
    tokenizer_digest: Digest = ""
    numerics: Prose = ""
    version: Prose = ""
    limits: Limits | None = None
    sessions: Count = 0
    step_us: Count = 0


class Announcement(Message, frozen=True, tag=TAGS + 10):
    """Retained. A release: the bytes of its manifest (see `edge.updates.manifest`) and their Ed25519 signature."""

    manifest: Annotated[bytes, Meta(max_length=1 << 16)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


AnyMessage: TypeAlias = (
    Open | Opened | Draft | Commit | Resync | Close | Error | DeviceState | VerifierState | Announcement
)


def _unpack_hook(type: type, value: object) -> object:
    if type is Ids and isinstance(value, bytes):
        return unpack(value)
    raise WireError(f"expected packed ids, got {value.__class__.__name__}")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage, dec_hook=_unpack_hook)


def encode(message: AnyMessage) -> bytes:
    """The payload of a message. Raises WireError when it would be longer than MAX_PAYLOAD."""
    fields: list[Any] = [message.__struct_config__.tag, *msgspec.structs.astuple(message)]
    for default in reversed(message.__struct_defaults__):
        if fields[-1] != default:
            break
        fields.pop()
    payload = _encoder.encode([pack(field) if type(field) is Ids else field for field in fields])
    if len(payload) > MAX_PAYLOAD:
        raise WireError(
            f"{type(message).__name__} of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}",
            remedy="Shorten the prompt",
        )
    return payload


def decode(payload: bytes) -> AnyMessage:
    """The message of a payload, checked against every limit that needs no context. Raises WireError, nothing else."""
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    try:
        message = _decoder.decode(payload)
    except WireError:
        raise
    except (msgspec.MsgspecError, OutriderError, ValueError, OverflowError, RecursionError) as error:
        version = _version(payload)
        if version not in (None, VERSION):
            raise WireError(f"version {version} is not {VERSION}", remedy="Update the older side") from error
        raise WireError(str(error)) from error
    _check(message)
    return message


def _version(payload: bytes) -> int | None:
    """The version that a payload claims, where it looks like one of ours at all."""
    tag = payload[1] if len(payload) > 1 and 0x91 <= payload[0] <= 0x9F else 0
    return tag >> 4 if 0x10 <= tag <= 0x7F else None


def _check(message: AnyMessage) -> None:
    session = getattr(message, "session", 0)
    if session >= 1 << 64:
        raise WireError("session id is longer than 64 bits")
    if isinstance(message, Draft):
        if not 1 <= len(message.ids) <= MAX_DRAFT_IDS:
            raise WireError(f"a draft of {len(message.ids)} ids is not of 1 to {MAX_DRAFT_IDS}")
        if message.lead > message.base:
            raise WireError(f"a draft at {message.base} leads the device's text by {message.lead}")
    elif isinstance(message, Open) and not 1 <= message.prompt_len <= message.length:
        raise WireError(f"prompt_len {message.prompt_len} is not in 1..{message.length}, the ids of the text")


def open_key(payload: bytes) -> tuple[int, int] | None:
    """(session, epoch) of an `Open` that `decode` refused, so that the device can be told; None if even that fails."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    match fields:
        case [tag, int(session), int(epoch), *_] if tag == TAGS + 1 and 0 <= session < 1 << 64 and 0 <= epoch <= 0xFFFF:
            return session, epoch
    return None
