"""manifest.json: what an exported model directory holds, read on the board without any model library."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from protocol.errors import ModelError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DRAFTER_WEIGHTS = {
    "onnx": ("model.onnx", "model.onnx.data"),
    "native": ("drafter.safetensors",),
    "tensorrt": ("model.onnx", "model.onnx.data"),
    "litert": ("model.tflite",),
    "suffix": (),
}
HEAD_IDS = "head.ids"
TARGET_WEIGHTS = ("model.safetensors",)


class Golden(msgspec.Struct, frozen=True):
    """ids: the drafter's own greedy text behind `prompt`; sure: the places in `ids` that any board must agree on."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    sure: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """kind: "target" or "drafter"; digests: hex SHA-256, the weights' over the files in the order of `weights_files`.

    vocab_size: ids that the tokenizer has; context: tokens; dtype: of the weights that are not quantised.
    runtime: what a drafter is computed by, a key of DRAFTER_WEIGHTS.
    special_tokens: what the chat template may name. quantisation: part of the model -> how, in words.
    compute: weight and activation bits that the matrix products really run with, e.g. "w4a8".
    shortlist: ids in the head, listed in HEAD_IDS; 0 where it has all.
    golden: what a drafter must guess again on the board; None where it was not recorded.
    """

    kind: str
    name: str
    architecture: str
    source: dict[str, str]
    weights_digest: str
    tokenizer_digest: str
    vocab_size: int
    context: int
    dtype: str
    stop_ids: tuple[int, ...]
    chat_template: str
    runtime: str = "onnx"
    special_tokens: dict[str, str] = {}
    compute: str = ""
    quantisation: dict[str, str] = {}
    shortlist: int = 0
    golden: Golden | None = None

    @property
    def weights_files(self) -> tuple[str, ...]:
        if self.kind != "drafter":
            return TARGET_WEIGHTS
        return DRAFTER_WEIGHTS[self.runtime] + (HEAD_IDS,) * bool(self.shortlist)


def digest(*paths: Path) -> str:
    """Hex SHA-256 over the contents of files, one after the other. Raises ModelError for a file that is missing."""
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    total.update(block)
        except OSError as error:
            raise ModelError(error.strerror or str(error), where=str(path), remedy="export the model again") from error
    return total.hexdigest()


def read(directory: Path, kind: str, *, verify: bool = False) -> Manifest:
    """The manifest of a model directory, its tokenizer checked by digest, and with `verify` its weights too.

    kind: what it must hold, "" for either. Raises ModelError where a file is missing, cannot be read, or is not what
    the manifest says.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise ModelError(
            f"no manifest: {error.strerror}",
            where=str(path),
            remedy=f"make it: python -m tools.export {kind or 'drafter'} MODEL OUT",
        ) from error
    except msgspec.DecodeError as error:
        raise ModelError(f"not a manifest: {error}", where=str(path), remedy="export the model again") from error
    if kind and manifest.kind != kind:
        raise ModelError(
            f"holds a {manifest.kind}, not a {kind}", where=str(path), remedy=f"give the directory of the {kind}"
        )
    if manifest.runtime not in DRAFTER_WEIGHTS:
        raise ModelError(
            f"is for the runtime {manifest.runtime!r}, which is not known here",
            where=str(path),
            remedy=f"use a newer release, or export for one of: {', '.join(DRAFTER_WEIGHTS)}",
        )
    _check(directory / TOKENIZER, digest(directory / TOKENIZER), manifest.tokenizer_digest)
    weights = [directory / name for name in manifest.weights_files]
    if verify and weights:
        _check(weights[-1], digest(*weights), manifest.weights_digest)
    for file in weights:
        if not file.is_file():
            raise ModelError("no such file", where=str(file), remedy="export the model again")
    return manifest


def _check(path: Path, found: str, said: str) -> None:
    if found != said:
        raise ModelError(
            f"digest {found[:12]}… is not the manifest's {said[:12]}…", where=str(path), remedy="export the model again"
        )
