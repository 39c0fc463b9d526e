"""Write a model directory: all of it or nothing, the manifest last."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from edge.drafters import golden, runtimes
from edge.drafters.manifest import (
    DRAFTER_WEIGHTS,
    HEAD_IDS,
    MANIFEST,
    TARGET_WEIGHTS,
    TOKENIZER,
    Golden,
    Manifest,
    digest,
    read,
)
from protocol.errors import ConfigError
from tools.export import graph, packed, qdq, shortlist
from tools.export.calibrate import calibrate, fast_products, key
from tools.export.calibration_text import Corpus
from tools.export.quantise import Blocks
from tools.export.quantised import EMBEDDING, HEAD, Options, Progress, quantise_model
from tools.export.sources import Source
from tools.export.tune import tune

CHAT_TEMPLATE = "chat_template.jinja"
GOLDEN_TEXT = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday. One, two, three, four, five,"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_target(source: Source, out: Path, dtype: str = "float32", force: bool = False) -> Manifest:
    """A directory that transformers loads: config.json, model.safetensors, tokenizer and manifest.

    Raises ConfigError where `out` cannot be written.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    with directory(out, force) as part:
        weights = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in source.weights.items()}
        save_file(weights, part / TARGET_WEIGHTS[0], metadata={"format": "pt"})
        source.config.dtype = dtype
        source.config.save_pretrained(part)
        special = {key: getattr(source.config, key, None) for key in ("bos_token_id", "pad_token_id")}
        GenerationConfig(eos_token_id=list(source.stop_ids), **special).save_pretrained(part)
        return _finish(source, part, kind="target", dtype=dtype, context=source.config.max_position_embeddings)


def write_drafter(
    source: Source,
    out: Path,
    options: Options,
    force: bool = False,
    progress: Progress | None = None,
    head_ids: np.ndarray | None = None,
    corpus: Corpus | None = None,
    workdir: Path | None = None,
) -> Manifest:
    """A directory that the board's drafter loads. head_ids: the head's, int32 [m] ascending, None for all.

    corpus: text to calibrate on; without it every weight is rounded by itself. workdir: where a calibration that is cut
    off goes on from, by default beside `out`.
    Raises ConfigError where `out` cannot be written, ModelError where the runtime cannot express the model.
    """
    with directory(out, force) as part:
        graph.check(source.config)
        weights = source.weights
        if corpus:
            kept = (workdir or out.with_name(f"{out.name}.calibration")) / key(source.origin["sha256"], options, corpus)
            blocks = calibrate(source.config, weights, options, corpus, kept, progress)
            with fast_products():
                blocks, vectors = tune(source.config, weights, blocks, corpus, kept, progress)
            weights = {**weights, **vectors}
        else:
            blocks = quantise_model(source.config, weights, options, progress)
        head_plain = corpus is None or blocks[HEAD] is blocks.get(EMBEDDING)
        if head_ids is not None:
            blocks = shortlist.cut(blocks, head_ids)
            (part / HEAD_IDS).write_bytes(head_ids.astype("<i4").tobytes())
        most = source.config.max_position_embeddings
        context = min(options.context or most, most)
        match options.runtime:
            case "native":
                rope = graph.rotations(source.config, context)
                packed.save(source.config, weights, blocks, part / DRAFTER_WEIGHTS["native"][0], rope)
            case "tensorrt":
                qdq.Graph(source.config, weights, blocks, context).save(part)
            case _:
                graph.build(source.config, weights, blocks, options).save(part)
        manifest = _finish(
            source,
            part,
            kind="drafter",
            dtype="float16" if options.runtime == "tensorrt" else "float32",
            context=context,
            runtime=options.runtime,
            compute=_compute(options),
            quantisation=_describe(options, blocks, corpus, head_plain),
            shortlist=0 if head_ids is None else len(head_ids),
        )
        kind = runtimes.ON_CPU.get(options.runtime, "auto")
        manifest = msgspec.structs.replace(manifest, golden=_golden(part, kind))
        _save(manifest, part)
        return manifest


def write_litert(source: Source, file: Path, out: Path, force: bool = False) -> Manifest:
    """A directory that the board's LiteRT drafter loads, from the `.tflite` file of the same model.

    Raises ConfigError where `out` cannot be written, ModelError where the file is not of a form that the drafter takes.
    """
    from tools.export import litert

    with directory(out, force) as part:
        found = litert.examine(file)
        shutil.copyfile(file, part / DRAFTER_WEIGHTS["litert"][0])
        manifest = _finish(
            source,
            part,
            kind="drafter",
            runtime="litert",
            dtype="float32",
            context=min(found.slots, source.config.max_position_embeddings),
            compute=found.compute,
            quantisation=found.parts,
        )
        manifest = msgspec.structs.replace(manifest, golden=_golden(part))
        _save(manifest, part)
        return manifest


def write_tokenizer(exported: Path, out: Path, force: bool = False) -> Manifest:
    """A directory for a board without a model: what it needs of another exported one, a target's or a drafter's.

    Raises ConfigError where `out` cannot be written, ModelError where `exported` cannot be used.
    """
    facts = read(exported, "")
    with directory(out, force) as part:
        for name in (TOKENIZER, facts.chat_template):
            (part / name).write_bytes((exported / name).read_bytes())
        manifest = msgspec.structs.replace(
            facts,
            kind="drafter",
            runtime="suffix",
            weights_digest=digest(),
            dtype="none",
            compute="none",
            quantisation={},
            shortlist=0,
            golden=None,
        )
        _save(manifest, part)
        return manifest


def _golden(part: Path, kind: str = "auto") -> Golden | None:
    """What the drafter guesses here; None where its runtime is not installed, or the text has no token of its own."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(part / TOKENIZER)).encode(GOLDEN_TEXT, add_special_tokens=False).ids
    try:
        drafter = runtimes.load(part, kind, context=len(ids) + golden.GUESSES)
    except ImportError:
        return None
    return golden.record(drafter, ids) if 0 < len(ids) + golden.GUESSES <= drafter.info.context else None


def _compute(options: Options) -> str:
    if options.runtime in ("native", "tensorrt"):
        return f"w{options.bits}a16"
    return f"w{options.bits}a{8 if options.accuracy_level == 4 else 32}"


def _describe(
    options: Options, blocks: Mapping[str, Blocks], corpus: Corpus | None, head_plain: bool
) -> Mapping[str, str]:
    def format(name: str) -> str:
        signed = "symmetric" if blocks[name].zero_points is None else "asymmetric"
        return f"int{blocks[name].bits} {signed} groups of {blocks[name].group}, float16 scales"

    text = f"on {corpus.tokens} tokens of {corpus.digest[:12]}" if corpus else ""
    if blocks.get(EMBEDDING) is blocks[HEAD]:
        embedding = "the head's matrix"
    else:
        embedding = format(EMBEDDING) if options.rounds_embedding else "float16"
    learned = f", GPTQ, scales learned, {text}" if text else ""
    return {
        "weights": format("model.layers.0.self_attn.q_proj.weight") + learned,
        "keys and values": format("model.layers.0.self_attn.k_proj.weight") + learned,
        "head": format(HEAD) + ("" if head_plain else f", GPTQ {text}"),
        "embedding": embedding,
        "activations": _activations(options),
        "cache": "float16" if options.runtime == "tensorrt" else "float32",
    }


def _activations(options: Options) -> str:
    if options.runtime == "tensorrt":
        return "float16 in products, float32 in attention's scores and elsewhere"
    if options.runtime == "native":
        return f"16-bit fixed point in groups of {options.group} inside products, float32 elsewhere"
    if options.accuracy_level == 4:
        return f"int8 in groups of {options.group} inside MatMulNBits (accuracy level 4), float32 elsewhere"
    return f"float32 (MatMulNBits accuracy level {options.accuracy_level})"


def _finish(source: Source, part: Path, *, kind: str, **facts: Any) -> Manifest:
    (part / TOKENIZER).write_bytes(source.tokenizer)
    (part / CHAT_TEMPLATE).write_text(source.chat_template, encoding="utf-8")
    manifest = Manifest(
        kind=kind,
        name=source.name,
        architecture=source.architecture,
        source=source.origin,
        weights_digest="",
        tokenizer_digest=digest(part / TOKENIZER),
        vocab_size=source.vocab_size,
        stop_ids=source.stop_ids,
        chat_template=CHAT_TEMPLATE,
        special_tokens=source.special_tokens,
        **facts,
    )
    files = [part / name for name in manifest.weights_files]
    manifest = msgspec.structs.replace(manifest, weights_digest=digest(*files))
    _save(manifest, part)
    return manifest


def _save(manifest: Manifest, part: Path) -> None:
    (part / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def check_free(out: Path, force: bool) -> None:
    """Raises ConfigError where `out` is taken: `force` replaces an earlier export, and nothing else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise ConfigError("exists and is not an exported model", where=str(out), remedy="choose another directory")
    if not force:
        raise ConfigError("exists", where=str(out), remedy="add --force to replace it, or choose another directory")


@contextmanager
def directory(out: Path, force: bool) -> Iterator[Path]:
    """A temporary directory beside `out` that takes its place when the block ends without an error."""
    check_free(out, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(out.parent), remedy="choose another place") from error
    try:
        yield part
        part.chmod(0o755)
        for file in part.iterdir():
            file.chmod(0o644)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            out.rename(old / out.name)
            part.rename(out)
            shutil.rmtree(old)
        else:
            part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
