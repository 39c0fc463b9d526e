"""A random model as a target directory, decoding with an engine, and drafters that know what comes some of the time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from cloud.engines.base import Plan, Work
from cloud.engines.torch_engine import TorchEngine
from protocol.sampling import Sampling

VOCAB = 500  # of the tokenizer; the model's own is wider
POISON = 499  # its embedding is not a number
BLOCK = 32  # tokens of the KV cache
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4  # layers, keys and values, key heads, head size, bytes

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)

Drafter = Callable[[list[int], list[int]], tuple[list[int], list[int]]]

_strangers = count()


def make_target(directory: Path, architecture: str, **more: Any) -> Path:
    """A random model that is sure of nothing and never repeats itself, exported as a target directory.

    more: of its configuration.
    """
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB + 12,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(architecture, **shape))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0
        model.get_output_embeddings().weight[VOCAB:] *= 9  # would win, were they not cut off
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    manifest = {
        "kind": "target",
        "name": f"tiny {architecture}",
        "architecture": architecture,
        "source": {"made": "here"},
        "weights_digest": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "tokenizer_digest": hashlib.sha256(b"{}").hexdigest(),
        "vocab_size": VOCAB,
        "context": 400,
        "dtype": "float32",
        "chat_template": "",
    }
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return directory


def prompts(*lengths: int, vocab: int = VOCAB - 1) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


def prefill(engine: TorchEngine, key: int, chunk: int = 1000) -> None:
    while engine.pending(key) > 1:
        outcome = engine.step(Plan([Work(key, min(chunk, engine.pending(key) - 1))]))
        assert not outcome.failed


def decode(
    engine: TorchEngine, texts: list[list[int]], sampling: Sampling, new: int, drafter: Drafter
) -> list[list[int]]:
    """Decode all texts together, `new` ids each; drafter(true future or what is known, text) -> (draft, parents).

    By a tenant that nobody knows, so that nothing is reused.
    """
    tenant = f"stranger{next(_strangers)}"
    lengths = [len(text) for text in texts]
    for key, text in enumerate(texts):
        engine.open(key, text, sampling, len(text) + new, tenant)
        prefill(engine, key, chunk=11 + key)
    grown = [list(text) for text in texts]
    while True:
        work = []
        for key, text in enumerate(grown):
            if len(text) - lengths[key] < new:
                draft, parents = drafter([key], text)
                work.append(Work(key, 1, draft, parents))
        if not work:
            break
        outcome = engine.step(Plan(work))
        assert not outcome.failed
        for key, ids in outcome.accepted.items():
            grown[key] += ids
            assert engine.pending(key) == 1
    for key in range(len(texts)):
        engine.close(key)
    return [text[length : length + new] for text, length in zip(grown, lengths, strict=True)]


def no_draft(_key: list[int], _text: list[int]) -> tuple[list[int], list[int]]:
    return [], []


def drafters(truth: list[list[int]], texts: list[list[int]]) -> dict[str, Drafter]:
    """Drafters that know what comes, some of the time, in the shapes that a device may send."""
    generator = random.Random(11)

    def future(key: list[int], text: list[int], n: int) -> list[int]:
        done = len(text) - len(texts[key[0]])
        known = truth[key[0]][done : done + n]
        return known + [generator.randrange(VOCAB - 1) for _ in range(n - len(known))]

    def good(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        return future(key, text, 4), [-1, 0, 1, 2]

    def bad(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        return [(id + 1) % (VOCAB - 1) for id in future(key, text, 4)], [-1, 0, 1, 2]

    def half(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        ids = future(key, text, 5)
        return [*ids[:2], (ids[2] + 1) % (VOCAB - 1), *ids[3:]], [-1, 0, 1, 2, 3]

    def tree(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        a, b, c, d = future(key, text, 4)
        wrong = (a + 3) % (VOCAB - 1)
        return [wrong, a, wrong, b, b, c, wrong, d], [-1, -1, 0, 1, 2, 3, 3, 5]

    def random_tree(key: list[int], text: list[int]) -> tuple[list[int], list[int]]:
        ids = future(key, text, 4)
        size = generator.randrange(1, 9)
        parents = [generator.randrange(-1, i) if i else -1 for i in range(size)]
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        draft = [ids[d] if d < 4 and generator.random() < 0.7 else generator.randrange(VOCAB - 1) for d in depth]
        return draft, parents

    return {"good": good, "bad": bad, "half": half, "tree": tree, "random_tree": random_tree}


def reference_logits(target: Path, ids: Sequence[int]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]
