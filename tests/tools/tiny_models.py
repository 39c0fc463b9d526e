"""Tiny random models with a real byte-level tokenizer, as a Hugging Face directory and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the cat sat on the mat, and the hat sat on the cat", "one two three 123 456", "für Straße 日本語 🙂 naïve"]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}


def tokenizer() -> Tokenizer:
    """Byte-level BPE that cuts digits one by one, as SmolLM2's does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def directory(path: Path, architecture: str, *, tied: bool = True, **shape: int) -> Path:
    """A directory with a random llama or qwen2 model whose logits are wider than its tokenizer.

    shape: what shall differ from SHAPE.
    """
    made = tokenizer()
    common = SHAPE | dict(
        vocab_size=(made.get_vocab_size() + 63) // 32 * 32,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=2,
        bos_token_id=1,
        **shape,
    )
    config = LlamaConfig(**common) if architecture == "llama" else Qwen2Config(**common)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # which start as ones and zeros, and would hide a mistake
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], bos_token_id=1)
    model.save_pretrained(path)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[2], bos_token=SPECIAL[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    return path


def gguf_file(path: Path, source: Path, *, architecture: str = "llama", pre: str = "smollm") -> Path:
    """The model of a directory as llama.cpp's converter lays it out: own names, llama's q and k rows in pairs."""
    model = AutoModelForCausalLM.from_pretrained(source)
    config, made = model.config, tokenizer()
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = sorted(made.get_vocab(), key=made.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    unused = config.vocab_size - len(tokens)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(unused)])
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens] + [5] * unused)
    merges = json.loads(made.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        name = name.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        name = name.replace("model.norm", "output_norm").replace("lm_head", "output")
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
