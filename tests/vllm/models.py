"""A random model that is sure of nothing, as a target directory, and engines over it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch
import transformers

from cloud.engines.vllm.engine import VllmEngine
from cloud.engines.vllm.load import Options, load

VOCAB = 500  # of the tokenizer; the model's own is wider
POISON = 499  # its embedding is not a number
CONTEXT = 384
MAX_DRAFT = 8
LAYERS, KV_HEADS, HEAD = 2, 2, 32
BLOCK = 32  # tokens
BLOCK_BYTES = BLOCK * LAYERS * 2 * KV_HEADS * HEAD * 4
ROOMY, SMALL = 400, 12  # blocks; the longest text with a whole draft takes 13


def make_target(directory: Path) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        vocab_size=VOCAB + 12,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0
        model.get_output_embeddings().weight[VOCAB:] *= 9  # would win, were they not cut off
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    manifest = {
        "kind": "target",
        "name": "tiny llama",
        "architecture": "llama",
        "weights_digest": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "tokenizer_digest": hashlib.sha256(b"{}").hexdigest(),
        "vocab_size": VOCAB,
        "context": CONTEXT,
        "dtype": "float32",
    }
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return directory


def load_tiny(target: Path, blocks: int) -> VllmEngine:
    options = Options(
        kv_cache_memory_bytes=(blocks + 1) * BLOCK_BYTES,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        block_size=BLOCK,
        enforce_eager=True,
    )
    return load(target, options=options, max_draft=MAX_DRAFT, threads=1)
