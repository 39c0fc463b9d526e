"""From a configuration to a verifier at its broker."""

from __future__ import annotations

import logging
import os
import secrets

from cloud.config import CloudConfig
from cloud.engines.base import Engine
from cloud.gateway import Gateway
from cloud.probe import probe
from cloud.verifier import Verifier
from cloud.watch import Watch
from link.command import package_version

log = logging.getLogger(__name__)


def make_engine(config: CloudConfig) -> Engine:
    """The engine that `config` names. Raises ModelError or NumericsError where it cannot be had."""
    if config.engine.kind == "vllm":
        return _make_vllm(config)
    from cloud.engines.torch_engine import load  # it imports torch, which takes seconds

    return load(
        config.engine.model,
        config.numerics.numerics(),
        kv_bytes=int(config.engine.kv_gib * 2**30),
        max_draft=config.limits.draft_rows,
        threads=config.engine.threads or os.cpu_count(),
        verify_weights=config.engine.verify_weights,
    )


def _make_vllm(config: CloudConfig) -> Engine:
    from cloud.engines.vllm.versions import installed

    installed()  # before anything of vLLM is imported, so that what is missing or unknown is named
    from cloud.engines.vllm.load import Options, load

    given = config.vllm
    options = Options(
        kv_cache_memory_bytes=int(config.engine.kv_gib * 2**30),
        gpu_memory_utilization=given.gpu_memory_utilization,
        max_num_seqs=given.max_num_seqs or config.limits.sessions,
        max_num_batched_tokens=given.max_num_batched_tokens or config.scheduler.rows,
        block_size=given.block_size,
        max_model_len=given.max_model_len or 0,
        enforce_eager=given.enforce_eager,
    )
    return load(
        config.engine.model,
        config.numerics.numerics(),
        options,
        max_draft=config.limits.draft_rows,
        threads=config.engine.threads or os.cpu_count(),
        verify_weights=config.engine.verify_weights,
    )


def make_gateway(config: CloudConfig, engine: Engine, watch: Watch) -> Gateway:
    """A gateway with a verifier over `engine`, whose steps are measured first."""
    cost = probe(engine, config.scheduler.probe_s, config.limits.draft_rows)
    log.info("a step of 1 row takes %.1f ms, of 32 rows %.1f", cost.seconds(1) * 1e3, cost.seconds(32) * 1e3)
    name, info = config.verifier or f"v{secrets.token_hex(5)}", engine.info
    verifier = Verifier(
        name,
        engine,
        scheduler=config.scheduler.scheduler(),
        bounds=config.limits.bounds(),
        version=package_version(),
        contracts=config.contracts(),
        cost=cost,
        day=watch.measure(name, info.id),
        observers=watch.observers,
    )
    addresses = ", ".join(place.address for broker in config.all_brokers for place in broker.places)
    log.info("target %s, numerics %s, broker %s", info.id, info.numerics, addresses)
    gateway = Gateway(verifier, *config.all_brokers)
    watch.look_at(gateway)
    return gateway
