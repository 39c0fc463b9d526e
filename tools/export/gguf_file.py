"""GGUF files: llama.cpp's tensor names, its permuted q/k rows, and its tokenizer metadata, turned back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edge.drafters.manifest import digest
from protocol.errors import ModelError
from tools.export.sources import Source, canonical, check_architecture, check_complete, vocab_size

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Standardized tensor names".
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Control tokens that end a turn in some family; a file names at most three of them by id.
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "</s>")

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def read(path: Path) -> Source:
    """Read a GGUF file; every tensor is dequantised to float32.

    Raises ModelError for what is not a GGUF file, is cut short, or holds an architecture, a tokenizer or a rope
    scaling that cannot be turned back exactly.
    """
    from gguf import GGUFReader

    where = str(path)
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelError(f"not a readable GGUF file: {error}", where=where, remedy="fetch it again") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = str(metadata.get("general.architecture", ""))
    check_architecture(architecture, where)

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors, architecture, where)
    tokenizer = _tokenizer(metadata, where)
    tokens = metadata["tokenizer.ggml.tokens"]
    if not metadata.get("tokenizer.chat_template"):
        raise ModelError("the file has no chat template", where=where, remedy="use an instruct model")
    weights = dict(_weights(tensors, config, where))
    check_complete(config, weights, where)
    return Source(
        name=_name(path),
        origin={"path": where, "sha256": digest(path)},
        config=config,
        weights=weights,
        tokenizer=tokenizer.to_str().encode(),
        vocab_size=vocab_size(tokenizer),
        chat_template=metadata["tokenizer.chat_template"],
        stop_ids=_stop_ids(metadata),
        special_tokens={
            f"{short}_token": tokens[metadata[key]]
            for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
            if (key := f"tokenizer.ggml.{long}_token_id") in metadata
        },
    )


def _name(path: Path) -> str:
    """The file's name without what only says how it was quantised."""
    return re.sub(r"[-._](i?q\d\w*|f16|f32|bf16)$", "", path.stem, flags=re.IGNORECASE).lower()


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any], architecture: str, where: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelError(f"no metadata {architecture}.{key}", where=where, remedy="fetch the file again")
        return found

    if "rope_freqs.weight" in tensors or value("rope.scaling.type", "none") != "none":
        raise ModelError(
            "its rope scaling cannot be turned back exactly from GGUF",
            where=where,
            remedy="export the same model from its Hugging Face directory",
        )
    if "token_embd.weight" not in tensors:
        raise ModelError("no tensor token_embd.weight", where=where, remedy="fetch the file again")
    heads = value("attention.head_count")
    end = metadata.get("tokenizer.ggml.eos_token_id")
    common = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", value("embedding_length") // heads),
        "max_position_embeddings": value("context_length"),
        # float32 metadata: 1e-5 is stored as 9.9999997e-06
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base", 10000.0))},
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end,
        "architectures": ["LlamaForCausalLM" if architecture == "llama" else "Qwen2ForCausalLM"],
    }
    return LlamaConfig(**common) if architecture == "llama" else Qwen2Config(**common)


def _weights(tensors: Mapping[str, Any], config: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf import dequantize

    for name, tensor in tensors.items():
        try:
            array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"tensor {name}: {error}", where=where, remedy="use a common quantisation") from error
        if config.model_type == "llama" and (part := re.search(r"\.attn_([qk])\.", name)):
            heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
            array = _unpermute(array, heads)
        yield _hugging_face_name(name, where), torch.from_numpy(array)


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs, transformers the two halves of a head: put the rows back in halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _hugging_face_name(name: str, where: str) -> str:
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        if layer[2] in LAYER_NAMES:
            return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    elif (model := re.fullmatch(r"(\w+)\.weight", name)) and model[1] in MODEL_NAMES:
        return f"{MODEL_NAMES[model[1]]}.weight"
    raise ModelError(f"unknown tensor {name}", where=where, remedy="export from the Hugging Face directory instead")


def _stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{short}_token_id" for short in ("eos", "eot", "eom")]
    named = {int(metadata[key]) for key in keys if key in metadata}
    kinds = metadata["tokenizer.ggml.token_type"]
    listed = {
        index
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if token in END_OF_TURN and kinds[index] == CONTROL
    }
    return tuple(sorted(named | listed))


def _tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """A tokenizer.json's content. Raises ModelError for a kind whose splitting rules are not known here."""
    kind, splitter = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or splitter not in SPLITTERS:
        raise ModelError(
            f"tokenizer {kind!r} with pre-tokenizer {splitter!r} is not supported",
            where=where,
            remedy=f"supported: byte-level BPE with {', '.join(SPLITTERS)}; "
            "or export from the Hugging Face directory, which brings its tokenizer.json",
        )
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens) if kinds[index] != UNUSED},
            merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=splitter in ("llama-bpe", "llama3"),
        )
    )
    if splitter == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITTERS[splitter])
    tokenizer.decoder = decoders.ByteLevel()
    for index, token in enumerate(tokens):  # in id order, so that the file is the same every time
        if kinds[index] in (CONTROL, USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kinds[index] == CONTROL)
            tokenizer.add_special_tokens([added]) if kinds[index] == CONTROL else tokenizer.add_tokens([added])
    return canonical(tokenizer)


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# tokenizer.ggml.pre -> how text is cut before the merges, as in each family's own tokenizer.json
SPLITTERS: dict[str, list[Any]] = {
    "default": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": _split(QWEN2_SPLIT),
    "llama-bpe": _split(LLAMA3_SPLIT),
    "llama3": _split(LLAMA3_SPLIT),
}
