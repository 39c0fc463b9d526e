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
    logits          float [n, vocab]
    present.<layer>.key|value  the same buffers: bind both to one pointer, and ONNX Runtime writes the new rows in place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from edge.drafters.manifest import DRAFTER_WEIGHTS
from protocol.errors import ModelError
from tools.export.quantise import Blocks, quantise

ONNX_WEIGHTS = DRAFTER_WEIGHTS["onnx"]
MICROSOFT = "com.microsoft"

# Two quantisations of one matrix differ by less than this of its norm; other matrices by about 1.4.
SAME_MATRIX = 0.15


@dataclass(frozen=True)
class Options:
    """How the graph is quantised. accuracy_level: of MatMulNBits, 4 computes with int8 activations, 1 with float32."""

    group: int = 32
    head_bits: int = 8
    symmetric: bool = False
    accuracy_level: int = 4
    context: int | None = None


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

    def matmul(self, name: str, x: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str:
        """x [1, rows, k] times a 4-bit weight [n, k], plus bias [n]."""
        blocks = quantise(weight, 4, self.options.group, self.options.symmetric)
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


def build(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    options: Options,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Graph, bool]:
    """The graph of a llama or qwen2 model, and whether embedding and head share one matrix.

    progress: called with (layers done, layers in all).
    Raises ModelError for a configuration that the graph cannot express.
    """
    _check(config, options)
    graph = Graph(options)
    context = min(options.context or config.max_position_embeddings, config.max_position_embeddings)
    cos, sin = _rope(config, context)
    rope = [graph.constant("cos", cos), graph.constant("sin", sin)]
    _declare(graph, config)

    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    tied = head is embedding or _same_matrix(embedding, head)
    head_blocks = quantise(head, options.head_bits, options.group, symmetric=True)
    head_names = graph.blocks("head", head_blocks)
    if tied:
        residual = _embed(graph, head_blocks, head_names)
    else:
        embedding_blocks = quantise(embedding, options.head_bits, options.group, symmetric=True)
        residual = _embed(graph, embedding_blocks, graph.blocks("embedding", embedding_blocks))

    branch = ""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        part = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        residual, branch = _layer(graph, config, layer, part, residual, branch, rope)
        if progress:
            progress(layer + 1, config.num_hidden_layers)

    rows, skip = (graph.op("Gather", f"{x}.wanted", [x, "logit_rows"], axis=1) for x in (residual, branch))
    norm = graph.constant("norm", weights["model.norm.weight"].float().numpy())
    hidden = graph.op(
        "SkipSimplifiedLayerNormalization", "hidden", [rows, skip, norm], domain=MICROSOFT, epsilon=config.rms_norm_eps
    )
    logits = graph.matmul_blocks("head.logits", hidden, head_blocks, head_names)
    graph.op("Squeeze", "squeeze", [logits, graph.constant("axis0", np.array([0], np.int64))], ["logits"])
    return graph, tied


def _check(config: Any, options: Options) -> None:
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
    elif config.hidden_size % options.group:
        problem = f"hidden size {config.hidden_size} with groups of {options.group}"
    if problem:
        raise ModelError(
            f"{problem} is not supported by the drafter's graph",
            where=f"{config.model_type} configuration",
            remedy="draft with another model of the family",
        )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any, context: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [context, head_dim / 2], as transformers computes them for this configuration."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(context)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().numpy(), sin[0, :, :half].float().numpy()


def _same_matrix(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices are one, quantised twice, as in GGUF files of models with tied embeddings."""
    if a.shape != b.shape:
        return False
    sample = slice(0, None, max(1, a.shape[0] // 4096))
    x, y = a[sample].float(), b[sample].float()
    return float((x - y).norm()) < SAME_MATRIX * float(y.norm())


def _declare(graph: Graph, config: Any) -> None:
    heads, width = config.num_key_value_heads, _head_dim(config)
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
    graph.outputs.append(helper.make_tensor_value_info("logits", float32, ["n", config.vocab_size]))
    for layer in range(config.num_hidden_layers):
        for side in ("key", "value"):
            graph.inputs.append(helper.make_tensor_value_info(f"past.{layer}.{side}", float32, cache))
            graph.outputs.append(helper.make_tensor_value_info(f"present.{layer}.{side}", float32, cache))


def _embed(graph: Graph, blocks: Blocks, names: tuple[str, str, str]) -> str:
    """Rows of the quantised matrix, by id: [1, rows, hidden]. Reads the head's own bytes where the two are tied."""
    # Its scales want the rank of the packed bytes, the product's do not.
    scales = graph.constant("embedding.scales3", blocks.scales[:, :, None])
    gathered = graph.op(
        "GatherBlockQuantized", "embedding.blocks", [names[0], "input_ids", scales], domain=MICROSOFT,
        bits=blocks.bits, block_size=blocks.group, gather_axis=0, quantize_axis=2,
    )  # fmt: skip
    shape = graph.constant("embedding.shape", np.array([1, -1, blocks.scales.shape[1] * blocks.group], np.int64))
    return graph.op("Reshape", "embedding.rows", [gathered, shape])


def _layer(
    graph: Graph, config: Any, layer: int, part: Mapping[str, torch.Tensor], residual: str, branch: str,
    rope: list[str],
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
    qkv = torch.cat([part[f"self_attn.{p}_proj.weight"] for p in "qkv"])
    biases = [part[bias] for p in "qkv" if (bias := f"self_attn.{p}_proj.bias") in part]
    packed = graph.matmul(f"{name}.qkv", x, qkv, torch.cat(biases) if biases else None)
    attention = graph.op(
        "GroupQueryAttention", f"{name}.attention",
        [packed, "", "", f"past.{layer}.key", f"past.{layer}.value", "seqlens_k", "total_length", *rope,
         "position_ids", "attention_bias"],
        [f"{name}.attended", f"present.{layer}.key", f"present.{layer}.value"],
        domain=MICROSOFT, num_heads=config.num_attention_heads, kv_num_heads=config.num_key_value_heads,
        do_rotary=1, rotary_interleaved=0, scale=_head_dim(config) ** -0.5,
    )[0]  # fmt: skip
    out = graph.matmul(f"{name}.out", attention, part["self_attn.o_proj.weight"], part.get("self_attn.o_proj.bias"))

    x, residual = norm("post_attention_layernorm", residual, out)
    gate = graph.matmul(f"{name}.gate", x, part["mlp.gate_proj.weight"])
    up = graph.matmul(f"{name}.up", x, part["mlp.up_proj.weight"])
    silu = graph.op("QuickGelu", f"{name}.silu", [gate], domain=MICROSOFT, alpha=1.0)
    gated = graph.op("Mul", f"{name}.gated", [silu, up])
    return residual, graph.matmul(f"{name}.down", gated, part["mlp.down_proj.weight"])
