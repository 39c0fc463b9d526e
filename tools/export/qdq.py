"""The drafter's graph in standard ONNX operators: 4-bit weights in Q/DQ form, for TensorRT and others that read ONNX.

TensorRT 10 takes weights of four bits as a DequantizeLinear in front of a MatMul: blocks along k, positive scales, no
zero points, an even n. Products run in float16; the residual stream, norms, rotations and scores in float32.

Inputs, for `rows` new rows behind `past` slots of the cache, of which `bias` hides those that a row does not see:
    ids         int32 [rows]
    positions   int32 [rows]                  a row's position in its text, which in a tree is not its slot
    bias        float16 [rows, past + rows]   0 where the row sees the slot, very negative where it does not
    wanted      int32 [n]                     which of the new rows the head is computed for
    past.<layer>.key|value   float16 [past, kv_heads, head_dim]   slots first, so that a longer past is a longer prefix
Outputs:
    logits      float32 [n, m], of the ids that the head has, their number made even
    new         float16 [2 * layers, rows, kv_heads * head_dim]   key and value of each layer, to be put behind the past
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from edge.drafters.manifest import DRAFTER_WEIGHTS
from tools.export.graph import head_dim, rotations
from tools.export.quantise import Blocks
from tools.export.quantised import EMBEDDING, HEAD, Options

OPSET = 21  # the first with weights of four bits in blocks
GROUP = 128
LEAST_SCALE = 2.0**-14  # the smallest normal float16: a scale must be positive, of an empty block too


def options(group: int = GROUP, context: int | None = None) -> Options:
    """How a drafter is quantised for this graph. group: weights that share a scale, 64 or 128."""
    return Options(runtime="tensorrt", group=group, head_bits=4, symmetric=True, context=context)


class Graph:
    """A llama or qwen2 model: products from `blocks`, the rest from `weights`. `save` writes it, its weights beside it.

    context: positions that it can be asked for.
    """

    def __init__(
        self, config: Any, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, Blocks], context: int
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.config, self.weights, self.blocks = config, weights, blocks
        self.kv_heads, self.width = config.num_key_value_heads, head_dim(config)
        self._rope = self._angles(context)
        self.new: list[str] = []

        self.float("bias.float", "bias")
        table = self.constant("embedding", weights[EMBEDDING].half().numpy())
        residual = self.op("Cast", "embedded", [self.op("Gather", "embedding.rows", [table, "ids"])], to=FLOAT)
        for layer in range(config.num_hidden_layers):
            residual = self._layer(layer, residual)
        rows = self.op("Gather", "wanted.rows", [residual, "wanted"])
        logits = self.matmul("head", self.norm("norm", rows, "model.norm.weight"), [HEAD])
        self.op("Cast", "head.float", [logits], "logits", to=FLOAT)
        self.op("Concat", "new.all", self.new, "new", axis=0)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _layer(self, layer: int, residual: str) -> str:
        name, prefix = f"layer{layer}", f"model.layers.{layer}."
        x = self.norm(f"{name}.in", residual, f"{prefix}input_layernorm.weight")
        attended = self._attention(layer, x)
        out = self.matmul(f"{name}.out", attended, [f"{prefix}self_attn.o_proj.weight"])
        residual = self.op("Add", f"{name}.attended", [residual, self.float(f"{name}.out.float", out)])
        if (bias := self.weights.get(f"{prefix}self_attn.o_proj.bias")) is not None:
            bias_name = self.constant(f"{name}.out.bias", bias.float().numpy())
            residual = self.op("Add", f"{name}.attended.biased", [residual, bias_name])

        x = self.norm(f"{name}.post", residual, f"{prefix}post_attention_layernorm.weight")
        both = self.matmul(f"{name}.gate_up", x, [f"{prefix}mlp.{side}_proj.weight" for side in ("gate", "up")])
        gate, up = self.split(f"{name}.gate_up", both, 1, [self.config.intermediate_size] * 2)
        silu = self.op("Mul", f"{name}.silu", [gate, self.op("Sigmoid", f"{name}.sigmoid", [gate])])
        gated = self.op("Mul", f"{name}.gated", [silu, up])
        down = self.matmul(f"{name}.down", gated, [f"{prefix}mlp.down_proj.weight"])
        return self.op("Add", f"{name}.sum", [residual, self.float(f"{name}.down.float", down)])

    def _attention(self, layer: int, x: str) -> str:
        """[rows, heads * head_dim] of what the rows attend to; the rows' own keys and values join `new`."""
        name, kv, width = f"layer{layer}", self.kv_heads, self.width
        heads = self.config.num_attention_heads
        parts = [f"model.layers.{layer}.self_attn.{p}_proj" for p in "qkv"]
        qkv = self.float(f"{name}.qkv.float", self.matmul(f"{name}.qkv", x, [f"{part}.weight" for part in parts]))
        biases = [self.weights[f"{part}.bias"] for part in parts if f"{part}.bias" in self.weights]
        if biases:
            qkv = self.op(
                "Add", f"{name}.qkv.biased", [qkv, self.constant(f"{name}.bias", torch.cat(biases).float().numpy())]
            )
        qk, v = self.split(f"{name}.qkv", qkv, 1, [(heads + kv) * width, kv * width])
        turned = self._rotate(name, self.reshape(f"{name}.qk.heads", qk, [-1, heads + kv, width]))
        q, k = self.split(f"{name}.turned", turned, 1, [heads, kv])
        q = self.op("Mul", f"{name}.q.scaled", [q, self.constant("scale", np.array(width**-0.5, np.float32))])
        q = self.reshape(f"{name}.q.groups", q, [-1, kv, heads // kv, width])
        q = self.op("Transpose", f"{name}.q", [q], perm=[1, 2, 0, 3])  # [kv, group, rows, width]
        k = self.half(f"{name}.k.half", k)
        v = self.half(f"{name}.v.half", self.reshape(f"{name}.v.heads", v, [-1, kv, width]))
        self.new += [
            self.reshape(f"{name}.new.{s}", side, [1, -1, kv * width]) for s, side in (("key", k), ("value", v))
        ]

        keys = self.op("Concat", f"{name}.keys", [f"past.{layer}.key", k], axis=0)  # [total, kv, width]
        # Scores of Qwen2.5 reach 1466, where a float16's step is 1: softmax would see little of what sets them apart.
        keys = self.op("Transpose", f"{name}.keys.turned", [self.float(f"{name}.keys.float", keys)], perm=[1, 2, 0])
        scores = self.op("MatMul", f"{name}.scores", [q, self.unsqueeze(f"{name}.keys.all", keys)])
        scores = self.op("Add", f"{name}.seen", [scores, "bias.float"])  # [kv, group, rows, total]
        shares = self.half(f"{name}.shares.half", self.op("Softmax", f"{name}.shares", [scores], axis=-1))
        values = self.op("Concat", f"{name}.values", [f"past.{layer}.value", v], axis=0)
        values = self.op("Transpose", f"{name}.values.turned", [values], perm=[1, 0, 2])
        mixed = self.op("MatMul", f"{name}.mixed", [shares, self.unsqueeze(f"{name}.values.all", values)])
        mixed = self.op("Transpose", f"{name}.mixed.rows", [mixed], perm=[2, 0, 1, 3])
        return self.reshape(f"{name}.mixed.flat", mixed, [-1, heads * width])

    def _angles(self, context: int) -> tuple[str, str]:
        """cos and sin of the rows' positions, [rows, 1, head_dim / 2]."""
        found = []
        for which, table in zip(("cos", "sin"), rotations(self.config, context), strict=True):
            rows = self.op("Gather", f"{which}.rows", [self.constant(which, table), "positions"])
            found.append(self.unsqueeze(f"{which}.heads", rows))
        return found[0], found[1]

    def _rotate(self, name: str, x: str) -> str:
        """[rows, heads, head_dim], its two halves turned against each other."""
        cos, sin = self._rope
        a, b = self.split(f"{name}.halves", x, 2, [self.width // 2] * 2)

        def mix(which: str, kind: str, left: str, right: str) -> str:
            products = [
                self.op("Mul", f"{name}.{which}.{i}", pair) for i, pair in enumerate(([left, cos], [right, sin]))
            ]
            return self.op(kind, f"{name}.{which}", products)

        return self.op("Concat", f"{name}.rotated", [mix("first", "Sub", a, b), mix("second", "Add", b, a)], axis=2)

    def norm(self, name: str, x: str, weight: str) -> str:
        """x over its root mean square, times the weight, as float16."""
        two = self.constant("two", np.array(2, np.float32))
        epsilon = self.constant("epsilon", np.array(self.config.rms_norm_eps, np.float32))
        squares = self.op("Pow", f"{name}.squares", [x, two])
        mean = self.op(
            "ReduceMean", f"{name}.mean", [squares, self.constant("last", np.array([-1], np.int64))], keepdims=1
        )
        root = self.op("Sqrt", f"{name}.root", [self.op("Add", f"{name}.epsilon", [mean, epsilon])])
        scaled = self.op("Div", f"{name}.scaled", [x, root])
        gamma = self.constant(f"{name}.gamma", self.weights[weight].float().numpy())
        return self.half(f"{name}.half", self.op("Mul", f"{name}.out", [scaled, gamma]))

    def matmul(self, name: str, x: str, matrices: list[str]) -> str:
        """x [rows, k] times matrices [n, k] below each other: float16 [rows, n]."""
        parts = [int4(self.blocks[matrix]) for matrix in matrices]
        levels = np.concatenate([levels for levels, _ in parts], axis=1)  # [k, n]
        scales = np.concatenate([scales for _, scales in parts], axis=1)  # [groups, n]
        if levels.shape[1] % 2:
            levels, scales = np.pad(levels, ((0, 0), (0, 1))), np.pad(scales, ((0, 0), (0, 1)), mode="edge")
        if (missing := levels.shape[0] - self.blocks[matrices[0]].k) > 0:
            ends = self.constant(f"pad{missing}", np.array([0, 0, 0, missing], np.int64))
            x = self.op("Pad", f"{name}.padded", [x, ends, self.constant("zero", np.array(0, np.float16))])
        self.initializers[f"{name}.levels"] = _int4_tensor(f"{name}.levels", levels)
        whole = self.op(
            "DequantizeLinear", f"{name}.weight", [f"{name}.levels", self.constant(f"{name}.scales", scales)],
            axis=0, block_size=levels.shape[0] // scales.shape[0],
        )  # fmt: skip
        return self.op("MatMul", f"{name}.product", [x, whole])

    # -- nodes --------------------------------------------------------------------------------------------------------

    def constant(self, name: str, array: np.ndarray) -> str:
        """An initializer; one that is there already is used again."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def op(self, kind: str, name: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output or name], name=name, **attributes))
        return output or name

    def split(self, name: str, x: str, axis: int, sizes: list[int]) -> list[str]:
        names = [f"{name}.part{i}" for i in range(len(sizes))]
        lengths = self.constant(f"sizes{sizes}", np.array(sizes, np.int64))
        self.nodes.append(helper.make_node("Split", [x, lengths], names, name=f"{name}.split", axis=axis))
        return names

    def reshape(self, name: str, x: str, shape: list[int]) -> str:
        return self.op("Reshape", name, [x, self.constant(f"shape{shape}", np.array(shape, np.int64))])

    def unsqueeze(self, name: str, x: str) -> str:
        """With a dimension of 1 behind the first."""
        return self.op("Unsqueeze", name, [x, self.constant("second", np.array([1], np.int64))])

    def half(self, name: str, x: str) -> str:
        return self.op("Cast", name, [x], to=HALF)

    def float(self, name: str, x: str) -> str:
        return self.op("Cast", name, [x], to=FLOAT)

    def save(self, directory: Path) -> None:
        layers = range(self.config.num_hidden_layers)
        sides = [f"{layer}.{side}" for layer in layers for side in ("key", "value")]
        inputs: list[tuple[str, int, list[Any]]] = [
            ("ids", TensorProto.INT32, ["rows"]),
            ("positions", TensorProto.INT32, ["rows"]),
            ("bias", HALF, ["rows", "total"]),
            ("wanted", TensorProto.INT32, ["n"]),
            *((f"past.{side}", HALF, ["past", self.kv_heads, self.width]) for side in sides),
        ]
        vocab = self.blocks[HEAD].n + self.blocks[HEAD].n % 2
        outputs: list[tuple[str, int, list[Any]]] = [
            ("logits", FLOAT, ["n", vocab]),
            ("new", HALF, [len(sides), "rows", self.kv_heads * self.width]),
        ]
        graph = helper.make_graph(
            self.nodes,
            "drafter",
            [helper.make_tensor_value_info(*value) for value in inputs],
            [helper.make_tensor_value_info(*value) for value in outputs],
            list(self.initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="outrider", ir_version=10)
        model_file, weights_file = DRAFTER_WEIGHTS["tensorrt"]
        onnx.save_model(
            model, str(directory / model_file), save_as_external_data=True, location=weights_file, size_threshold=1024
        )


FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def int4(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Levels -8 .. 7, int8 [k padded to whole groups, n], and positive scales, float16 [groups, n]."""
    assert blocks.bits == 4 and blocks.zero_points is None and (blocks.scales >= 0).all()
    q = np.stack([blocks.packed & 0xF, blocks.packed >> 4], axis=-1).astype(np.int8)  # [n, groups, bytes, 2]
    levels = q.reshape(blocks.n, -1) - 8
    scales = np.maximum(blocks.scales, LEAST_SCALE).astype(np.float16)
    return np.ascontiguousarray(levels.T), np.ascontiguousarray(scales.T)


def _int4_tensor(name: str, levels: np.ndarray) -> onnx.TensorProto:
    """Two levels a byte, the first in the low bits."""
    nibbles = levels.reshape(-1).view(np.uint8) & 0xF
    packed = nibbles[0::2] | (nibbles[1::2] << 4)
    tensor = TensorProto(name=name, data_type=TensorProto.INT4, dims=levels.shape, raw_data=packed.tobytes())
    return tensor
