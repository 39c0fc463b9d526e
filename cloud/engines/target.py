"""A target directory's manifest, and the short id that stands for everything that decides the text."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ModelError

EXPORT_AGAIN = "Export the target again with `python -m tools.export target`"


class TargetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json of a target. context: tokens; vocab_size: ids that the tokenizer has; digests: hex SHA-256."""

    kind: str
    name: str
    architecture: str
    weights_digest: str
    tokenizer_digest: str
    vocab_size: int
    context: int
    dtype: str
    chat_template: str = ""
    source: dict[str, Any] = {}


def read_manifest(directory: Path, *, verify_weights: bool = False) -> TargetManifest:
    """Read and check `directory`'s manifest against its tokenizer, and against its weights where asked to.

    Raises ModelError for a file that is missing, corrupt, of another kind, or of another digest.
    """
    path = directory / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=TargetManifest)
    except FileNotFoundError:
        raise ModelError("there is no manifest.json", where=str(directory), remedy=EXPORT_AGAIN) from None
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(path), remedy=EXPORT_AGAIN) from error
    if manifest.kind != "target":
        raise ModelError(f"kind is {manifest.kind!r}, not 'target'", where=str(path), remedy=EXPORT_AGAIN)
    if manifest.vocab_size < 1 or manifest.context < 1:
        raise ModelError("vocab_size and context must be at least 1", where=str(path), remedy=EXPORT_AGAIN)
    check_digest(directory / "tokenizer.json", manifest.tokenizer_digest)
    if verify_weights:
        check_digest(directory / "model.safetensors", manifest.weights_digest)
    return manifest


def check_digest(path: Path, expected: str) -> None:
    """Raise ModelError where the file at `path` is missing or its SHA-256 is not `expected` (hex)."""
    try:
        with path.open("rb") as file:
            found = sha256_file(file)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path), remedy=EXPORT_AGAIN) from error
    if found != expected:
        raise ModelError(
            f"its digest is {found[:12]}…, the manifest says {expected[:12]}…", where=str(path), remedy=EXPORT_AGAIN
        )


def sha256_file(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def target_id(name: str, weights_digest: str, tokenizer_digest: str, sampling_version: int, numerics: str) -> str:
    """The short id of a target, one topic level: its cleaned name and 48 bits of a digest of what decides the text."""
    clean = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:48] or "target"
    facts = "\n".join((weights_digest, tokenizer_digest, f"sampling {sampling_version}", numerics))
    return f"{clean}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
