"""`.tflite` language models: made with litert-torch, and read for what computes in what."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.drafters.litert import LitertForward, open_file
from protocol.errors import ModelError

PREFILL_LENGTHS = (8, 64)  # the longest is what a drafter's prefill hands over at once
RECIPES = ("dynamic_wi8_afp32", "dynamic_wi4b32_afp32", "dynamic_wi4_afp32", "weight_only_wi8_afp32", "none")


@dataclass(frozen=True, slots=True)
class Found:
    """slots: of the cache; compute: weight and activation bits of most matrix products; parts: part of the model ->
    how it is held, in words."""

    slots: int
    compute: str
    parts: dict[str, str]


def convert(model: Path, work: Path, recipe: str, context: int) -> Path:
    """The `.tflite` file, somewhere below `work`, of a Hugging Face directory.

    recipe: of ai-edge-quantizer; context: slots of the cache, all of which the board holds in memory, twice.
    Raises ModelError where litert-torch is not installed or cannot convert the model.
    """
    export = _exporter(str(model))
    try:
        export(
            model=str(model),
            output_dir=str(work),
            prefill_lengths=list(PREFILL_LENGTHS),
            cache_length=context,
            quantization_recipe=recipe,
            bundle_litert_lm=False,
        )
    except Exception as error:  # whatever torch, MLIR or the quantiser raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"litert-torch cannot convert it: {reason}", where=str(model), remedy="see docs/litert.md"
        ) from error
    made = {file.name: file for file in work.rglob("*.tflite")}
    return made["model.tflite" if recipe == "none" else "model_quantized.tflite"]


def examine(file: Path) -> Found:
    """What a file holds and computes in. Raises ModelError for one that the drafter does not take."""
    slots = LitertForward(open_file(file, threads=1), str(file)).capacity
    from ai_edge_litert import schema_py_generated as schema

    names = {value: name for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
    model = schema.Model.GetRootAs(file.read_bytes())
    signatures = (model.SignatureDefs(i) for i in range(model.SignatureDefsLength()))
    (decode,) = (one.SubgraphIndex() for one in signatures if one.SignatureKey() == b"decode")
    graph = model.Subgraphs(decode)
    operators = list(_operators(model, graph))
    stored = {
        operator.Outputs(0): operator.Inputs(0)
        for code, operator in operators
        if code == schema.BuiltinOperator.DEQUANTIZE
    }

    def held(operator: Any) -> tuple[Any, str]:
        """The tensor that an operator's weights are held in, and how, in words."""
        tensor = graph.Tensors(stored.get(operator.Inputs(1), operator.Inputs(1)))
        return tensor, f"{names[tensor.Type()].lower()}{_scales(tensor)}"

    def product(operator: Any) -> tuple[str, str, int]:
        """(bits as in w8a32, weights in words, elements) of a matrix product."""
        tensor, words = held(operator)
        weights, given = names[tensor.Type()], names[graph.Tensors(operator.Inputs(0)).Type()]
        inside = operator.Inputs(1) not in stored and weights.startswith("INT") and given == "FLOAT32"
        return f"w{_bits(weights)}a{8 if inside else _bits(given)}", words, int(tensor.ShapeAsNumpy().prod())

    products = [product(operator) for code, operator in operators if code == schema.BuiltinOperator.FULLY_CONNECTED]
    if not products:
        raise ModelError("decode has no matrix product", where=str(file), remedy="see docs/litert.md")
    *layers, head = products
    sizes: Counter[tuple[str, str]] = Counter()
    for bits, words, size in layers or [head]:
        sizes[bits, words] += size
    ((compute, weights), _) = sizes.most_common(1)[0]
    activations = "int8 for each row inside the products, float32 elsewhere" if compute.endswith("a8") else "float32"
    parts = {"weights": weights, "head": head[1], "activations": activations}
    for code, operator in operators:
        if code == schema.BuiltinOperator.EMBEDDING_LOOKUP:
            parts["embedding"] = held(operator)[1]
    return Found(slots, compute, parts)


def _operators(model: Any, graph: Any) -> Iterator[tuple[int, Any]]:
    """(builtin code, operator), in order."""
    for i in range(graph.OperatorsLength()):
        operator = graph.Operators(i)
        code = model.OperatorCodes(operator.OpcodeIndex())
        yield max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), operator


def _bits(type_name: str) -> int:
    return int("".join(filter(str.isdigit, type_name)))


def _scales(tensor: Any) -> str:
    from ai_edge_litert import schema_py_generated as schema

    quantisation = tensor.Quantization()
    if quantisation is None:
        return ""
    if quantisation.DetailsType() == schema.QuantizationDetails.BlockwiseQuantization:
        blocks, table = schema.BlockwiseQuantization(), quantisation.Details()
        blocks.Init(table.Bytes, table.Pos)
        return f", a scale for each {blocks.BlockSize()}"
    scales = quantisation.ScaleLength()
    rows = int(tensor.Shape(quantisation.QuantizedDimension()))
    return ", a scale for each row" if scales == rows > 1 else f", {scales} scales" if scales else ""


def _exporter(where: str) -> Callable[..., None]:
    """litert-torch's `export`."""
    try:
        # It looks whether tensorflow is there by its import specification, so before a stand-in has none.
        import torch._dynamo  # noqa: F401

        if importlib.util.find_spec("tensorflow") is None:
            _lend_schema()
        from litert_torch.generative.export_hf.export import export
    except ImportError as error:
        raise ModelError(
            f"litert-torch cannot be used here: {error}",
            where=where,
            remedy="pip install litert-torch, or give a converted file with --tflite: docs/litert.md",
        ) from error
    return export


def _lend_schema() -> None:
    """litert-torch 0.10 takes the format's schema from tensorflow, which it does not require; LiteRT has the same."""
    from ai_edge_litert import schema_py_generated

    for name in ("tensorflow", "tensorflow.lite", "tensorflow.lite.python"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["tensorflow.lite.python"])["schema_py_generated"] = schema_py_generated
