"""A tiny decoder as an ONNX graph with the engine's signature, beside the same model in NumPy over the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from plugins.paged_attention.op import DOMAIN, INPUTS, OP_TYPE, VERSION, register_onnx_schema
from plugins.paged_attention.reference import reference
from runtime.executor import StepBatch

BLOCK_SIZE = 32
_TABLES = {"past_lens": "B", "query_starts": "B1", "block_ids": "N", "block_starts": "B1"}


def _axis(name: str) -> int:
    """The axis along which a weight has scales: an embedding's rows, a matrix's columns."""
    return 0 if name in ("embed", "positions") else 1


@dataclass
class TinyOnnx:
    """Token and position embeddings, attention layers with a residual, and a head. Weights are random.

    `weights`: "f32", "bf16" (stored so, cast to f32) or "int8" (DequantizeLinear; a scale a row of an embedding, a
    column of a matrix); the NumPy model computes with the very same values.
    """

    layers: int = 2
    hidden: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    vocab_size: int = 97
    context: int = 256
    weights: str = "f32"
    attributes: dict = field(default_factory=dict)
    rope: str | None = None  # "halves" or "interleaved": RotaryEmbedding of q and k, as the pass fuse_rope makes it
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes = {"embed": (self.vocab_size, self.hidden), "positions": (self.context, self.hidden)}
        for i in range(self.layers):
            shapes |= {f"q.{i}": (self.hidden, q), f"k.{i}": (self.hidden, kv), f"v.{i}": (self.hidden, kv)}
            shapes |= {f"o.{i}": (q, self.hidden)}
        shapes["head"] = (self.hidden, self.vocab_size)
        self._frequencies = (100.0 ** -np.linspace(0, 1, self.head_size // 2)).astype(np.float32)
        self._stored: dict[str, tuple[NDArray, NDArray | None]] = {}
        self._values: dict[str, NDArray[np.float32]] = {}
        for name, shape in shapes.items():
            value = (rng.standard_normal(shape) / np.sqrt(shape[0] if "." in name else 1)).astype(np.float32)
            stored, scale = value, None
            if self.weights == "bf16":
                stored = value.astype(ml_dtypes.bfloat16)
                value = stored.astype(np.float32)
            elif self.weights == "int8":
                scale = np.abs(value).max(1 - _axis(name), keepdims=True) / np.float32(127)
                stored = np.rint(value / scale).astype(np.int8)
                value = stored * scale
                scale = scale.ravel()
            self._stored[name], self._values[name] = (stored, scale), value

    @property
    def attention_attributes(self) -> dict:
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "v_head_size": self.head_size,
            "scale": self.head_size**-0.5,
            "sliding_window": 0,
            "softcap": 0.0,
            "block_size": BLOCK_SIZE,
            **self.attributes,
        }

    def model(self) -> ir.Model:
        """The checked graph."""
        register_onnx_schema()
        nodes, tensors = [], []

        def weight(name: str) -> str:
            stored, scale = self._stored[name]
            tensors.append(numpy_helper.from_array(stored, name))
            if scale is not None:
                tensors.append(numpy_helper.from_array(scale, f"{name}.scale"))
                inputs = [name, f"{name}.scale"]
                nodes.append(helper.make_node("DequantizeLinear", inputs, [f"{name}.f32"], axis=_axis(name)))
            elif stored.dtype != np.float32:
                nodes.append(helper.make_node("Cast", [name], [f"{name}.f32"], to=TensorProto.FLOAT))
            else:
                return name
            return f"{name}.f32"

        def node(op: str, inputs: list[str], output: str, **attributes) -> str:
            nodes.append(helper.make_node(op, inputs, [output], **attributes))
            return output

        def ints(name: str, *values: int) -> str:
            tensors.append(numpy_helper.from_array(np.array(values, np.int64), name))
            return name

        def rotate(rows: str, heads: int) -> str:
            shape = ints(f"{rows}.heads", -1, heads, 1, self.head_size)
            inputs = [node("Reshape", [rows, shape], f"{rows}.split"), "cos", "sin"]
            turned = node("RotaryEmbedding", inputs, f"{rows}.turned", interleaved=int(self.rope == "interleaved"))
            return node("Reshape", [turned, ints(f"{rows}.flat", -1, heads * self.head_size)], f"{rows}.rotated")

        if self.rope:
            tensors.append(numpy_helper.from_array(self._frequencies, "frequencies"))
            place = node("Cast", ["position_ids"], "position_ids.f32", to=TensorProto.FLOAT)
            place = node("Reshape", [place, ints("column", -1, 1, 1)], "position_ids.column")
            angle = node("Mul", [place, "frequencies"], "angle")
            node("Cos", [angle], "cos")
            node("Sin", [angle], "sin")
        x = node("Gather", [weight("embed"), "input_ids"], "tokens")
        x = node("Add", [x, node("Gather", [weight("positions"), "position_ids"], "places")], "x")
        for i in range(self.layers):
            q, k, v = (node("MatMul", [x, weight(f"{p}.{i}")], f"{p}_rows.{i}") for p in "qkv")
            if self.rope:
                q, k = rotate(q, self.num_heads), rotate(k, self.num_kv_heads)
            inputs = [q, k, v, f"key_cache.{i}", f"value_cache.{i}", *INPUTS[5:10]]
            attention = f"attention.{i}"
            node(OP_TYPE, inputs, attention, domain=DOMAIN, layer=i, kv_dtype="f32", **self.attention_attributes)
            x = node("Add", [x, node("MatMul", [attention, weight(f"o.{i}")], f"mixed.{i}")], f"x.{i}")
        rows = node("Gather", [x, "logits_rows"], "rows")
        node("MatMul", [rows, weight("head")], "logits")

        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["T"]) for name in ("input_ids", "position_ids")
        ]
        inputs += [helper.make_tensor_value_info(name, TensorProto.INT32, [dim]) for name, dim in _TABLES.items()]
        inputs.append(helper.make_tensor_value_info("max_context_len", TensorProto.INT32, []))
        inputs.append(helper.make_tensor_value_info("logits_rows", TensorProto.INT64, ["R"]))
        cells = ["num_blocks", self.num_kv_heads, BLOCK_SIZE, self.head_size]
        for i in range(self.layers):
            for name in (f"key_cache.{i}", f"value_cache.{i}"):
                inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, cells))
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["R", self.vocab_size])
        model = helper.make_model(
            helper.make_graph(nodes, "tiny", inputs, [logits], tensors),
            opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)],
            ir_version=10,
        )
        onnx.checker.check_model(model, full_check=True)
        return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))

    def caches(self, num_blocks: int) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Empty caches for `step`, a pair a layer."""
        shape = (num_blocks, self.num_kv_heads, BLOCK_SIZE, self.head_size)
        return [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(self.layers)]

    def step(self, batch: StepBatch, caches: list[tuple[NDArray, NDArray]]) -> NDArray[np.float32]:
        """The logits [R, vocab_size] of one step; `caches` are written in place."""
        w = self._values
        for source, target in batch.copies:
            for cache in (cache for pair in caches for cache in pair):
                cache[target] = cache[source]
        x = w["embed"][batch.token_ids] + w["positions"][batch.positions]
        tables = (batch.past_lens, batch.query_starts, batch.block_ids, batch.block_starts, batch.max_context_len)
        for i, (keys, values) in enumerate(caches):
            q, k, v = (x @ w[f"{p}.{i}"] for p in "qkv")
            q, k = self._rotate(q, batch.positions), self._rotate(k, batch.positions)
            x = x + reference(q, k, v, keys, values, *tables, **self.attention_attributes) @ w[f"o.{i}"]
        return x[batch.logits_rows] @ w["head"]

    def _rotate(self, rows: NDArray[np.float32], positions: NDArray) -> NDArray[np.float32]:
        """Rotary embedding (Su et al. 2021) of [T, heads * head_size]."""
        if not self.rope:
            return rows
        angle = (positions[:, None] * self._frequencies).astype(np.float32)[:, None]
        x = rows.reshape(len(rows), -1, self.head_size)
        out = np.empty_like(x)
        half = self.head_size // 2
        interleaved = self.rope == "interleaved"
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleaved else (np.s_[..., :half], np.s_[..., half:])
        out[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        out[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
        return out.reshape(rows.shape)
