"""Bytes that a pass of one row reads: all weights but those of which it takes single rows, and what the cache holds."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

from edge.drafters import container, manifest
from edge.drafters.native import BY_ROWS

GATHERS = ("Gather", "GatherBlockQuantized")


def of_export(directory: Path, context: int) -> int:
    """Of an exported drafter behind a text of `context` tokens."""
    match manifest.read(directory, "drafter").runtime:
        case "onnx":
            return _of_graph(directory / "model.onnx", context)
        case _:
            return _of_container(directory / "drafter.safetensors", context)


@cache  # its reader goes through every id of the vocabulary
def of_gguf(path: Path) -> int:
    """Of a GGUF file's weights; its embedding is read by rows, unless it is the head too."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


def _of_graph(path: Path, context: int) -> int:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    read = {name for node in graph.node if node.op_type not in GATHERS for name in node.input}
    widths = {
        kind: onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize for kind in {t.data_type for t in graph.initializer}
    }
    total = sum(prod(t.dims) * widths[t.data_type] for t in graph.initializer if t.name in read)
    for value in graph.input:
        if value.name.startswith("past."):
            dims = value.type.tensor_type.shape.dim
            total += 4 * context * dims[1].dim_value * dims[3].dim_value
    return total


def _of_container(path: Path, context: int) -> int:
    file = container.read(path)
    weights = [array for name, array in file.tensors.items() if not name.startswith(BY_ROWS)]
    layers, heads, width = (int(file.metadata[name]) for name in ("layers", "kv_heads", "head_dim"))
    return sum(array.nbytes for array in weights) + 2 * layers * heads * width * context * 4
