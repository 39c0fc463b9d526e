"""What each device is asked to write: an endless row of texts, known to whoever knows the device's name."""

from __future__ import annotations

import random
import zlib
from functools import lru_cache

from edge.session import Request
from protocol.sampling import Sampling
from tests.toys import TARGET, VOCAB, plain_decode

NUM_TOKENS = 240


def session_of(device: str, number: int) -> int:
    return zlib.crc32(device.encode()) << 32 | number


def number_of(session: int) -> int:
    return session & 0xFFFF_FFFF


def story(device: str, number: int, max_tokens: int = NUM_TOKENS) -> Request:
    """The device's text of that number: greedy where it is even, else sampled."""
    session = session_of(device, number)
    rng = random.Random(session)
    prompt = tuple(rng.randint(1, VOCAB - 1) for _ in range(rng.randint(4, 40)))
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=session) if number % 2 else Sampling()
    return Request(session, TARGET, prompt, sampling, max_tokens)


@lru_cache(maxsize=64)
def undisturbed(device: str, number: int, max_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """The text as the target writes it alone, a token a step, with no link and no drafts."""
    request = story(device, number, max_tokens)
    return tuple(plain_decode(request.prompt, request.sampling, request.max_tokens))
