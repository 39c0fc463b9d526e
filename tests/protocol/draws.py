"""What every implementation of the noise and of sampling is held to: published answers, words that are hard to round,
logits and parameters of all kinds.
"""

from __future__ import annotations

import numpy as np

from protocol.sampling import Sampling

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Of all 2^32 words, those whose number lies within 2^-28 of a step from halfway between two multiples of 2^-20, with
# the right multiple (from 200-bit arithmetic). Any logarithm good to a few last places rounds all other words right.
HARD_WORDS = [
    (223932905, -1135724),
    (350594628, -963133),
    (727912136, -601684),
    (806807037, -539061),
    (891825428, -474275),
    (894112665, -472565),
    (1071661794, -343966),
    (1228256144, -235533),
    (1338834621, -160719),
    (1607850170, 18464),
    (2089012956, 343367),
    (2681612114, 789412),
    (2812341756, 901121),
    (3063156631, 1137407),
    (3128443560, 1204964),
    (3141284827, 1218605),
    (3406059015, 1532495),
    (3469944133, 1620081),
    (3569922050, 1769932),
    (3786648983, 2172410),
    (3922013384, 2515186),
    (4037578024, 2919098),
    (4250577726, 4788852),
]

KINDS = ("normal", "peaked", "flat", "tied", "masked", "zeros", "wide")
TEMPERATURES = (0.0, 0.05, 0.3, 0.8, 1.0, 1.7, 4.0)
TOP_KS = (0, 0, 1, 2, 5, 50, 100_000)
TOP_PS = (1.0, 1.0, 1e-300, 0.1, 0.5, 0.95, 0.9999999, 1 - 2**-53)


def make_logits(rng, kind, vocab):
    """Logits [vocab] float32 of one shape of trouble."""
    logits = rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 4.0])
    if kind == "peaked":
        logits[rng.integers(vocab)] += 20
    elif kind == "flat":
        logits[:] = 1.5
    elif kind == "tied":
        logits = np.round(logits)
    elif kind == "masked":
        logits[rng.random(vocab) < 0.9] = -np.inf
        logits[rng.integers(vocab)] = 0.0
    elif kind == "zeros":
        logits = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    elif kind == "wide":
        logits *= 1000
    return logits.astype(np.float32)


def make_sampling(rng):
    return Sampling(
        temperature=float(rng.choice(TEMPERATURES)),
        top_k=int(rng.choice(TOP_KS)),
        top_p=float(rng.choice(TOP_PS)),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
    )
