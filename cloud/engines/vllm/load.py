"""From a target directory to a `VllmEngine`: version, vLLM's configuration, and a trial before anybody is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from cloud.engines.base import TargetInfo
from cloud.engines.numerics import Numerics
from cloud.engines.target import read_manifest, target_id
from cloud.engines.vllm.engine import VllmEngine
from cloud.engines.vllm.scheduler import NoDrafter, PlannedScheduler
from cloud.engines.vllm.trial import try_out
from cloud.engines.vllm.versions import installed
from protocol.errors import ConfigError, ModelError, NumericsError
from protocol.sampling import SPEC_VERSION

MOST_DRAFT = 128  # vLLM's own limit of draft rows of a request


@dataclass(frozen=True, slots=True)
class Options:
    """What vLLM is told, by its own names.

    kv_cache_memory_bytes: 0 takes what gpu_memory_utilization leaves for it, the share of the device's memory that vLLM
    may use in all; max_num_seqs, max_num_batched_tokens: sessions and rows of one step; block_size: tokens of a KV
    block; max_model_len: tokens of the longest text, 0 for the target's context.
    """

    kv_cache_memory_bytes: int = 2 << 30
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 32
    max_model_len: int = 0
    enforce_eager: bool = False


def load(
    model_dir: str | Path,
    numerics: Numerics | None = None,
    options: Options | None = None,
    *,
    max_draft: int = 32,
    threads: int | None = None,
    verify_weights: bool = False,
) -> VllmEngine:
    """Load a target directory into vLLM.

    max_draft: draft rows of a session in a step; threads: of torch, for the whole process; verify_weights: also
    compare the weights with the manifest's digest.
    Raises ModelError for a directory or a memory that cannot be used, NumericsError for a vLLM that is not known, that
    does not do what it is relied on for, or that is asked for exact numerics, ConfigError for drafts too long for it.
    """
    numerics = numerics or Numerics()
    options = options or Options()
    _, version = installed()
    if numerics.exact or numerics.isa or numerics.torch or numerics.bits:
        raise NumericsError(
            "vLLM promises no bits: its kernels differ from batch to batch",
            where="numerics",
            remedy='Set mode = "fast" and pin nothing, or use engine.kind = "torch"',
        )
    if max_draft > MOST_DRAFT:
        raise ConfigError(
            f"draft_rows {max_draft} is more than the {MOST_DRAFT} that vLLM verifies of a session in a step",
            where="limits",
        )
    directory = Path(model_dir)
    manifest = read_manifest(directory, verify_weights=verify_weights)
    dtype = numerics.dtype or manifest.dtype
    if threads is not None:
        torch.set_num_threads(threads)
    context = options.max_model_len or manifest.context
    core = make_core(directory, dtype, options, context=context, max_draft=max_draft)
    numerics_name = f"fast-vllm{version}-{dtype}"
    info = TargetInfo(
        id=target_id(manifest.name, manifest.weights_digest, manifest.tokenizer_digest, SPEC_VERSION, numerics_name),
        model=manifest.name,
        weights_digest=manifest.weights_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=manifest.vocab_size,
        context=context,
        numerics=numerics_name,
    )
    engine = VllmEngine(core, info, max_draft=max_draft)
    try_out(engine)
    return engine


def make_core(directory: Path, dtype: str, options: Options, *, context: int, max_draft: int) -> EngineCore:
    """vLLM's engine core with our scheduler, whose drafts come with its plans."""
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": max(options.max_num_batched_tokens, options.max_num_seqs),
        "block_size": options.block_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes or None,
        "enforce_eager": options.enforce_eager,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,  # a step's drafts are known only after the step before
        "scheduler_reserve_full_isl": False,  # whether a text fits is settled before it is opened
        "scheduler_cls": PlannedScheduler,
        "speculative_config": {
            "method": "custom_class",
            "model": f"{NoDrafter.__module__}.{NoDrafter.__qualname__}",
            "num_speculative_tokens": max_draft,
        },
    }
    if options.kv_cache_memory_bytes:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_memory_bytes
    elif options.gpu_memory_utilization:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    try:
        config = EngineArgs(**arguments).create_engine_config()
        return EngineCore(config, Executor.get_class(config), log_stats=False)
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelError(
            f"vLLM cannot run it: {error}",
            where=str(directory),
            remedy="The words are vLLM's; memory is set by engine.kv_gib, the longest text by vllm.max_model_len",
        ) from error
