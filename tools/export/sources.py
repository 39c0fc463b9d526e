"""Where a model comes from: a Hugging Face directory, a hub id, or a GGUF file, all read into one `Source`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from edge.drafters.manifest import digest
from protocol.errors import ModelError

# Architectures as both GGUF and Hugging Face's `model_type` spell them.
ARCHITECTURES = ("llama", "qwen2")

# What a chat template may name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Source:
    """A model in memory.

    config: transformers' configuration; weights: Hugging Face names, `lm_head.weight` only where it is not tied.
    tokenizer: the bytes of tokenizer.json; special_tokens: what a chat template may name, e.g. {"bos_token": "<s>"}.
    """

    name: str
    origin: dict[str, str]
    config: Any
    weights: Mapping[str, torch.Tensor]
    tokenizer: bytes
    vocab_size: int
    chat_template: str
    stop_ids: tuple[int, ...]
    special_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.config.model_type)


def read(model: str) -> Source:
    """Read MODEL: a directory, a .gguf file, or otherwise an id on the Hugging Face hub.

    Raises ModelError for a model that is missing, corrupt, or of an architecture that is not supported.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _read_directory(path, {"path": str(path)})
    if path.is_file():
        from tools.export import gguf_file

        return gguf_file.read(path)
    if path.suffix == ".gguf" or path.is_absolute() or model.count("/") != 1:
        raise ModelError("no such file or directory", where=model, remedy="give a directory, a .gguf file or a hub id")
    return _read_hub(model)


def check_architecture(architecture: str, where: str) -> None:
    """Raises ModelError, by name, for an architecture that the exporter has not been taught."""
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported",
            where=where,
            remedy=f"supported architectures: {', '.join(ARCHITECTURES)}",
        )


def check_complete(config: Any, weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises ModelError unless `weights` are exactly the tensors that the configuration calls for."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            want, have = (tuple(side[name].shape) if name in side else "none" for side in (expected, weights))
            raise ModelError(
                f"tensor {name}: shape {have}, where the configuration calls for {want}",
                where=where,
                remedy="fetch the model again",
            )


def _read_hub(model: str) -> Source:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        revision = HfApi().model_info(model).sha or "main"
        directory = snapshot_download(
            model, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(
            f"not a local path, and the hub did not give it: {error}",
            where=model,
            remedy="check the id and the network, or give a directory or a .gguf file",
        ) from error
    return _read_directory(Path(directory), {"hub": model, "revision": revision}, name=model.split("/")[1])


def _read_directory(path: Path, origin: dict[str, str], name: str = "") -> Source:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if not (path / "config.json").is_file():
        raise ModelError("no config.json", where=str(path), remedy="give a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(path)
        check_architecture(config.model_type, str(path))
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot be loaded: {error}", where=str(path), remedy="fetch the model again") from error
    if not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template", where=str(path), remedy="use an instruct model")
    weights = dict(model.state_dict())
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    generation = model.generation_config or GenerationConfig()
    eos = generation.eos_token_id if generation.eos_token_id is not None else tokenizer.eos_token_id
    backend = canonical(tokenizer.backend_tokenizer)
    check_complete(config, weights, str(path))
    return Source(
        name=name or path.resolve().name,
        origin=origin | {"sha256": _directory_digest(path)},
        config=config,
        weights=weights,
        tokenizer=backend.to_str().encode(),
        vocab_size=vocab_size(backend),
        chat_template=tokenizer.chat_template,
        stop_ids=tuple(sorted({eos} if isinstance(eos, int) else set(eos or ()))),
        special_tokens={key: str(token) for key in SPECIAL_TOKENS if (token := getattr(tokenizer, key, None))},
    )


def canonical(tokenizer: Tokenizer) -> Tokenizer:
    """Without truncation and padding, which belong to a caller and would change the file's digest."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """Ids that the tokenizer has: the highest one plus 1, since a model's logits are often wider."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _directory_digest(path: Path) -> str:
    """SHA-256 over the digests of the weight files in name order: one string for a sharded checkpoint too."""
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    return hashlib.sha256("".join(digest(file) for file in files).encode()).hexdigest()
