"""The drafter's ONNX graph: a llama-like decoder with 4-bit weights that evaluates the rows of a tree in one pass.

Inputs, for `rows` new rows behind `total - rows` that the cache holds, in slots 0 .. total-1 of `capacity`:
    input_ids       int64 [1, rows]
    position_ids    int64 [1, rows]             a row's position in its text, which in a tree is not its slot
    attention_bias  float [1, 1, rows, total]   0 where the row sees the slot, very negative where it does not
    seqlens_k       int32 [1]                   total - 1
    total_length    int32 []                    total
    logit_rows      int64 [n]                   which of the new rows the head is computed for
    past.<layer>.key|value     float [1, kv_heads, capacity, head_dim]
Outputs:
    logits          float [n, m]                of the ids in the head, all or a shortlist
    present.<layer>.key|value  the same buffers: bind both to one pointer, and ONNX Runtime writes the new rows in place
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from edge.drafters.manifest import DRAFTER_WEIGHTS
from protocol.errors import ModelError
from tools.export.quantise import Blocks, concatenate, zeros
from tools.export.quantised import EMBEDDING, HEAD, Options

T = TypeVar("T")
ONNX_WEIGHTS = DRAFTER_WEIGHTS["onnx"]
MICROSOFT = "com.microsoft"


class Graph:
    """Collects nodes and initializers; `save` writes model.onnx with its weights beside it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(
        self, kind: str, name: str, inputs: list[str], outputs: int | list[str] = 1, domain: str = "", **attributes: Any
    ) -> Any:
        names = outputs if isinstance(outputs, list) else [f"{name}.{i}" if i else name for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=name, domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def blocks(self, name: str, blocks: Blocks) -> tuple[str, str, str]:
        """Initializers of a quantised matrix: packed [n, groups, bytes], scales [n, groups], zero points or ""."""
        packed = self.constant(f"{name}.packed", blocks.packed)
        scales = self.constant(f"{name}.scales", blocks.scales)
        zeros = "" if blocks.zero_points is None else self.constant(f"{name}.zeros", blocks.zero_points)
        return packed, scales, zeros

    def matmul(self, name: str, x: str, blocks: Blocks, bias: torch.Tensor | None = None) -> str:
        """x [1, rows, k] times a quantised weight [n, k], plus bias [n]."""
        return self.matmul_blocks(name, x, blocks, self.blocks(name, blocks), bias)

    def matmul_blocks(
        self, name: str, x: str, blocks: Blocks, names: tuple[str, str, str], bias: torch.Tensor | None = None
    ) -> str:
        inputs = [x, *names]
        if bias is not None:
            inputs += ["", self.constant(f"{name}.bias", bias.float().numpy())]
        while not inputs[-1]:
            inputs.pop()
        return self.op(
            "MatMulNBits", name, inputs, domain=MICROSOFT, K=blocks.k, N=blocks.n, bits=blocks.bits,
            block_size=blocks.group, accuracy_level=self.options.accuracy_level,
        )  # fmt: skip

    def save(self, directory: Path) -> None:
        graph = helper.make_graph(self.nodes, "drafter", self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="outrider", ir_version=9)
        onnx.save_model(
            model,
            str(directory / ONNX_WEIGHTS[0]),
            save_as_external_data=True,
            location=ONNX_WEIGHTS[1],
            size_threshold=1024,
        )


def build(config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], options: Options) -> Graph:
    """The graph of a llama or qwen2 model: matrices from `blocks`, norms and biases from `weights`, by their names.

    Raises ModelError for a configuration that the graph cannot express.
    """
    check(config)
    graph = Graph(options)
    context = min(options.context or config.max_position_embeddings, config.max_position_embeddings)
    cos, sin = rotations(config, context)
    rope = [graph.constant("cos", cos), graph.constant("sin", sin)]
    _declare(graph, config, blocks[HEAD].n)

    head, embedding = blocks[HEAD], blocks[EMBEDDING]
    head_names = graph.blocks("head", head)
    embedding_packed = head_names[0] if embedding is head else graph.constant("embedding.packed", embedding.packed)
    residual = _embed(graph, config, embedding, embedding_packed)
    branch = ""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        vectors, matrices = _below(prefix, weights), _below(prefix, blocks)
        residual, branch = _layer(graph, config, layer, vectors, matrices, residual, branch, rope)

    rows, skip = (graph.op("Gather", f"{x}.wanted", [x, "logit_rows"], axis=1) for x in (residual, branch))
    norm = graph.constant("norm", weights["model.norm.weight"].float().numpy())
    hidden = graph.op(
        "SkipSimplifiedLayerNormalization", "hidden", [rows, skip, norm], domain=MICROSOFT, epsilon=config.rms_norm_eps
    )
    logits = graph.matmul_blocks("head.logits", hidden, head, head_names)
    graph.op("Squeeze", "squeeze", [logits, graph.constant("axis0", np.array([0], np.int64))], ["logits"])
    return graph


def _below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def check(config: Any) -> None:
    """Raises ModelError for a configuration that the graph cannot express."""
    rope = config.rope_parameters.get("rope_type", "default")
    problem = ""
    if config.hidden_act != "silu":
        problem = f"activation {config.hidden_act!r}"
    elif rope not in ("default", "llama3", "linear"):
        problem = f"rope type {rope!r}"
    elif getattr(config, "mlp_bias", False):
        problem = "mlp_bias"
    elif getattr(config, "use_sliding_window", False):
        problem = "use_sliding_window"
    elif config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        problem = "partial_rotary_factor"
    if problem:
        raise ModelError(
            f"{problem} is not supported by the drafter's graph",
            where=f"{config.model_type} configuration",
            remedy="draft with another model of the family",
        )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotations(config: Any, context: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [context, head_dim / 2] of the rotary embedding, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(context)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().numpy(), sin[0, :, :half].float().numpy()


def _declare(graph: Graph, config: Any, logits: int) -> None:
    heads, width = config.num_key_value_heads, head_dim(config)
    int64, int32, float32 = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT
    cache: list[Any] = [1, heads, "capacity", width]
    inputs: list[tuple[str, int, list[Any]]] = [
        ("input_ids", int64, [1, "rows"]),
        ("position_ids", int64, [1, "rows"]),
        ("attention_bias", float32, [1, 1, "rows", "total"]),
        ("seqlens_k", int32, [1]),
        ("total_length", int32, []),
        ("logit_rows", int64, ["n"]),
    ]
    for name, kind, shape in inputs:
        graph.inputs.append(helper.make_tensor_value_info(name, kind, shape))
    graph.outputs.append(helper.make_tensor_value_info("logits", float32, ["n", logits]))
    for layer in range(config.num_hidden_layers):
        for side in ("key", "value"):
            graph.inputs.append(helper.make_tensor_value_info(f"past.{layer}.{side}", float32, cache))
            graph.outputs.append(helper.make_tensor_value_info(f"present.{layer}.{side}", float32, cache))


def _embed(graph: Graph, config: Any, blocks: Blocks, packed: str) -> str:
    """Rows of the quantised matrix, by id: [1, rows, hidden]. Reads the head's own bytes where the two are tied."""
    # Unlike the product's, scales and zero points want the rank of the packed bytes, and a zero point its own byte.
    inputs = [packed, "input_ids", graph.constant("embedding.scales3", blocks.scales[:, :, None])]
    if blocks.zero_points is not None:
        inputs.append(graph.constant("embedding.zeros3", zeros(blocks).astype(np.uint8)[:, :, None]))
    gathered = graph.op(
        "GatherBlockQuantized", "embedding.blocks", inputs, domain=MICROSOFT,
        bits=blocks.bits, block_size=blocks.group, gather_axis=0, quantize_axis=2,
    )  # fmt: skip
    shape = graph.constant("embedding.shape", np.array([1, -1, blocks.scales.shape[1] * blocks.group], np.int64))
    rows = graph.op("Reshape", "embedding.rows", [gathered, shape])
    if config.hidden_size % blocks.group == 0:
        return rows
    ends = [
        graph.constant(f"embedding.{name}", np.array([at]))
        for name, at in (("start", 0), ("end", config.hidden_size), ("axis", 2))
    ]
    return graph.op("Slice", "embedding.whole", [rows, *ends])


def _layer(
    graph: Graph, config: Any, layer: int, part: Mapping[str, torch.Tensor], matrices: Mapping[str, Blocks],
    residual: str, branch: str, rope: list[str],
) -> tuple[str, str]:  # fmt: skip
    """One decoder layer. Returns the residual and the branch still to be added to it, which the next norm does."""
    name = f"layer{layer}"

    def norm(which: str, residual: str, branch: str) -> tuple[str, str]:
        gamma = graph.constant(f"{name}.{which}.gamma", part[f"{which}.weight"].float().numpy())
        if not branch:
            return graph.op(
                "SimplifiedLayerNormalization", f"{name}.{which}", [residual, gamma],
                epsilon=config.rms_norm_eps, axis=-1, stash_type=1,
            ), residual  # fmt: skip
        outputs = [f"{name}.{which}", "", "", f"{name}.{which}.sum"]
        graph.op(
            "SkipSimplifiedLayerNormalization", f"{name}.{which}.op", [residual, branch, gamma], outputs,
            domain=MICROSOFT, epsilon=config.rms_norm_eps,
        )  # fmt: skip
        return outputs[0], outputs[3]

    x, residual = norm("input_layernorm", residual, branch)
    # One product for q, k and v: GroupQueryAttention takes them packed.
    qkv = concatenate([matrices[f"self_attn.{p}_proj.weight"] for p in "qkv"])
    biases = [part[bias] for p in "qkv" if (bias := f"self_attn.{p}_proj.bias") in part]
    packed = graph.matmul(f"{name}.qkv", x, qkv, torch.cat(biases) if biases else None)
    attention = graph.op(
        "GroupQueryAttention", f"{name}.attention",
        [packed, "", "", f"past.{layer}.key", f"past.{layer}.value", "seqlens_k", "total_length", *rope,
         "position_ids", "attention_bias"],
        [f"{name}.attended", f"present.{layer}.key", f"present.{layer}.value"],
        domain=MICROSOFT, num_heads=config.num_attention_heads, kv_num_heads=config.num_key_value_heads,
        do_rotary=1, rotary_interleaved=0, scale=head_dim(config) ** -0.5,
    )[0]  # fmt: skip
    out = graph.matmul(f"{name}.out", attention, matrices["self_attn.o_proj.weight"], part.get("self_attn.o_proj.bias"))

    x, residual = norm("post_attention_layernorm", residual, out)
    gate = graph.matmul(f"{name}.gate", x, matrices["mlp.gate_proj.weight"])
    up = graph.matmul(f"{name}.up", x, matrices["mlp.up_proj.weight"])
    silu = graph.op("QuickGelu", f"{name}.silu", [gate], domain=MICROSOFT, alpha=1.0)
    gated = graph.op("Mul", f"{name}.gated", [silu, up])
    return residual, graph.matmul(f"{name}.down", gated, matrices["mlp.down_proj.weight"])
