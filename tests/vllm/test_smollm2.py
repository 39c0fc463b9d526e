"""A real model in vLLM: the fleet's texts beside vLLM's own plain decoding."""

from __future__ import annotations

import pytest

from protocol.sampling import Sampling
from tools.vllm import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from cloud.engines.numerics import Numerics
from cloud.engines.vllm.engine import VllmEngine
from cloud.engines.vllm.load import Options, load
from tests.vllm.fleet import NEW, Fleet, prompts
from tests.vllm.reference import Plain, assert_agree

CONTEXT = 512


@pytest.fixture(scope="module")
def plain_smollm2(smollm2_target) -> Plain:
    return Plain(smollm2_target, 49152, CONTEXT)


@pytest.fixture(scope="module")
def smollm2_engine(smollm2_target) -> VllmEngine:
    options = Options(kv_cache_memory_bytes=128 << 20, max_num_seqs=16, max_model_len=CONTEXT, enforce_eager=True)
    return load(smollm2_target, Numerics(dtype="float32"), options, max_draft=8, threads=2)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=11)], ids=["greedy", "sampled"]
)
def test_the_fleet_writes_what_vllm_writes(smollm2_engine, plain_smollm2, sampling) -> None:
    expected = plain_smollm2.decode(prompts(40, 7, 90, 120), sampling, NEW)
    fleet = Fleet(smollm2_engine, expected, sampling, seed=6, evictions=0.05)
    parted = [assert_agree(a, b, sampling) for a, b in zip(fleet.run(), expected, strict=True)]
    assert parted == [None] * 4 and fleet.accepted > 10
