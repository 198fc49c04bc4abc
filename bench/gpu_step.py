"""A decode step of the shape of Llama-3-8B by the torch engine: its graph, its Triton kernels and its CUDA graphs.

The graph has the operators that the builder makes of a Llama (a test holds them against each other), and no weights:
the engine takes random ones, made where they are used. So nothing is read, converted or built before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from bench.gpu_sizes import LlamaShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from plugins.torch_engine.graphs import Capture

_TABLES = ("past_lens", "query_starts", "block_ids", "block_starts")


class _Graph:
    """Collects nodes."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def op(self, kind: str, *inputs: ir.Value | None, count: int = 1, domain: str = "", **attributes: Any) -> Any:
        """A node's output, or outputs where it has several."""
        node = ir.node(kind, list(inputs), attributes=attributes or None, domain=domain, num_outputs=count)
        for value in node.outputs:
            value.name, value.dtype = f"{kind}_{len(self.nodes)}_{value.index()}", ir.DataType.FLOAT
        self.nodes.append(node)
        return node.outputs[0] if count == 1 else node.outputs

    def weight(self, name: str, *shape: int) -> ir.Value:
        """An initializer without a value."""
        if name not in self.initializers:
            kind = ir.TensorType(ir.DataType.FLOAT)
            self.initializers[name] = ir.Value(name=name, type=kind, shape=ir.Shape(shape))
        return self.initializers[name]

    def constant(self, name: str, array: NDArray) -> ir.Value:
        """An initializer with one."""
        if name not in self.initializers:
            tensor = ir.tensor(array, name=name)
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
        return self.initializers[name]

    def shape(self, *dims: int) -> ir.Value:
        return self.constant(f"shape_{'x'.join(map(str, dims))}", np.array(dims, np.int64))

    def product(self, x: ir.Value, name: str, rows: int, columns: int) -> ir.Value:
        """`x W^T` with the weight [rows, columns]."""
        return self.op("MatMul", x, self.op("Transpose", self.weight(name, rows, columns), perm=[1, 0]))


def llama_graph(shape: LlamaShape) -> ir.Model:
    """The graph of a Llama as the builder's passes leave it: merged products, rows gathered before the last MLP."""
    g, s = _Graph(), shape
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(dims))
        for name, kind, dims in (
            ("input_ids", ir.DataType.INT64, ["T"]), ("position_ids", ir.DataType.INT64, ["T"]),
            ("logits_rows", ir.DataType.INT64, ["R"]), ("past_lens", ir.DataType.INT32, ["B"]),
            ("query_starts", ir.DataType.INT32, ["B + 1"]), ("block_ids", ir.DataType.INT32, ["N"]),
            ("block_starts", ir.DataType.INT32, ["B + 1"]), ("max_context_len", ir.DataType.INT32, []),
        )
    }  # fmt: skip
    q, kv = s.heads * s.head, s.kv_heads * s.head
    half = s.head // 2
    frequencies = s.theta ** (-np.arange(half, dtype=np.float32) / half)
    x = g.op("Gather", g.weight("model.embed_tokens.weight", s.vocab, s.hidden), inputs["input_ids"], axis=0)
    at = g.op("Cast", g.op("Reshape", inputs["position_ids"], g.shape(-1, 1)), to=ir.DataType.FLOAT)
    angles = g.op("Mul", at, g.constant("model.model.rotary_emb.inv_freq", frequencies.astype(np.float32)))
    cos, sin = (g.op("Reshape", g.op(kind, angles), g.shape(-1, 1, half)) for kind in ("Cos", "Sin"))

    def norm(x: ir.Value, name: str) -> ir.Value:
        return g.op("RMSNormalization", x, g.weight(name, s.hidden), axis=-1, epsilon=s.epsilon)

    for i in range(s.layers):
        layer = f"model.layers.{i}"
        y = g.product(norm(x, f"{layer}.input_layernorm.weight"), f"{layer}.self_attn.qkv_proj.weight", q + 2 * kv,
                      s.hidden)  # fmt: skip
        sizes = g.constant("split_qkv", np.array([q, kv, kv], np.int64))
        query, key, value = g.op("Split", y, sizes, count=3, axis=-1)
        query, key = (
            g.op("Reshape", g.op("RotaryEmbedding", g.op("Reshape", part, g.shape(-1, heads, 1, s.head)), cos, sin,
                                 interleaved=0), g.shape(-1, heads * s.head))
            for part, heads in ((query, s.heads), (key, s.kv_heads))
        )  # fmt: skip
        for part in ("key_cache", "value_cache"):
            inputs[f"{part}.{i}"] = ir.Value(
                name=f"{part}.{i}", type=ir.TensorType(ir.DataType.FLOAT),
                shape=ir.Shape(["num_blocks", s.kv_heads, s.block_size, s.head]),
            )  # fmt: skip
        y = g.op(
            "PagedAttention", query, key, value, inputs[f"key_cache.{i}"], inputs[f"value_cache.{i}"],
            *(inputs[name] for name in _TABLES), inputs["max_context_len"], domain="plancast", layer=i,
            num_heads=s.heads, num_kv_heads=s.kv_heads, head_size=s.head, v_head_size=s.head, scale=s.head**-0.5,
            sliding_window=0, softcap=0.0, block_size=s.block_size, kv_dtype=s.kv, group_size=32, rotate="none",
            key_scale=0.0, value_scale=0.0,
        )  # fmt: skip
        if i == s.layers - 1:
            x, y = (g.op("Gather", part, inputs["logits_rows"], axis=0) for part in (x, y))
        x = g.op("Add", x, g.product(y, f"{layer}.self_attn.o_proj.weight", s.hidden, q))
        y = norm(x, f"{layer}.post_attention_layernorm.weight")
        y = g.product(y, f"{layer}.mlp.gate_up_proj.weight", 2 * s.intermediate, s.hidden)
        halves = g.constant("split_gate", np.array([s.intermediate] * 2, np.int64))
        gate, up = g.op("Split", y, halves, count=2, axis=-1)
        y = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        x = g.op("Add", x, g.product(y, f"{layer}.mlp.down_proj.weight", s.hidden, s.intermediate))
    logits = g.product(norm(x, "model.norm.weight"), "lm_head.weight", s.vocab, s.hidden)
    logits.name, logits.shape = "logits", ir.Shape(["R", s.vocab])
    graph = ir.Graph(
        list(inputs.values()), [logits], nodes=g.nodes, initializers=list(g.initializers.values()),
        opset_imports={"": 23, "plancast": 2}, name="llama",
    )  # fmt: skip
    return ir.Model(graph, ir_version=10)


class LlamaStep:
    """Decode steps of `sequences` sequences of `context` tokens, the new one included, as the executor runs them."""

    def __init__(
        self, device: torch.device, compute: str, shape: LlamaShape, sequences: int, context: int, capture: Capture
    ):
        from plugins.torch_engine.engine import COMPUTE, TorchEngine
        from plugins.torch_engine.graphs import DecodeGraphs

        dtype = COMPUTE[compute]

        def weight(name: str, dims: tuple[int, ...]) -> torch.Tensor:
            if len(dims) == 1:  # a norm's
                return torch.ones(dims, dtype=dtype, device=device)
            return torch.empty(dims, dtype=dtype, device=device).normal_().mul_(dims[-1] ** -0.5)

        graph = llama_graph(shape)
        self.engine = TorchEngine(graph, compute=compute, device=str(device), kernels="triton", weights=weight)
        blocks = -(-context // shape.block_size)
        self.engine.allocate(sequences * blocks)
        for cache in self.engine.caches:
            cache.view(COMPUTE[shape.kv]).normal_()
        self.graphs = DecodeGraphs(self.engine, capture, blocks)
        order = np.random.default_rng(0).permutation(sequences * blocks)
        self.feeds: dict[str, NDArray] = {
            "input_ids": np.arange(sequences, dtype=np.int64) % shape.vocab,
            "position_ids": np.full(sequences, context - 1, np.int64),
            "past_lens": np.full(sequences, context - 1, np.int32),
            "query_starts": np.arange(sequences + 1, dtype=np.int32),
            "block_ids": order.astype(np.int32),
            "block_starts": np.arange(sequences + 1, dtype=np.int32) * np.int32(blocks),
            "max_context_len": np.array(context, np.int32),
            "logits_rows": np.arange(sequences, dtype=np.int64),
        }
        cells = sequences * context * shape.kv_heads * shape.head * 2 * shape.layers
        # What a step must read: every matrix and every cell once.
        self.bytes = dtype.itemsize * shape.matrix_elements + COMPUTE[shape.kv].itemsize * cells

    def run(self) -> torch.Tensor:
        """Logits [sequences, vocabulary]: from the second run on by a CUDA graph, inputs uploaded each time."""
        return self.graphs.run(self.feeds)


def kernels_in(step: LlamaStep) -> Sequence[str]:
    """The operators of the engine that are Triton kernels, with how many there are of each."""
    fused = {name: n for name, n in step.engine.operators().items() if name.startswith(("Fused", "PagedAttention"))}
    return [f"{n} {name}" for name, n in sorted(fused.items())]
