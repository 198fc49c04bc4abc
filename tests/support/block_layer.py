"""Decoder layers as an OpenVINO model, in the form in which the ONNX front end leaves them, for the tests of blocks."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

HIDDEN, HEADS, SIZE, INNER = 96, 3, 32, 160
F32 = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def native_core() -> ov.Core:
    """A core that knows our operators; skips the test where they cannot be built."""
    from plugins.native import NativeBuildError, build_native

    try:
        library = build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")
    core = ov.Core()
    core.add_extension(str(library))
    return core


class Layer:
    """Two decoder layers with something in the middle that no block computes (a cumulative sum over the rows)."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.x = ops.parameter([-1, HIDDEN], np.float32, name="x")
        self.cos, self.sin = (ops.parameter([-1, 1, 1, SIZE], np.float32, name=name) for name in ("cos", "sin"))

    def weight(self, channels: int, columns: int) -> ov.Node:
        values = ops.constant(self.rng.integers(-127, 128, (channels, columns), dtype=np.int8))
        scale = ops.constant((self.rng.random((channels, 1)) * 0.3 / columns**0.5 / 64).astype(np.float32))
        return ops.multiply(ops.convert(values, ov.Type.f32), scale)

    def product(self, x: ov.Node | ov.Output, channels: int, columns: int) -> ov.Node:
        return ops.matmul(x, self.weight(channels, columns), False, True)

    def biased(self, product: ov.Node, channels: int) -> ov.Node:
        return ops.add(product, ops.constant(self.rng.standard_normal(channels).astype(np.float32)))

    def norm(self, x: ov.Node, size: int = HIDDEN) -> ov.Node:
        mean = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2))), ops.constant(np.array([-1])), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(1e-5))))
        gain = ops.constant((1 + self.rng.random(size)).astype(np.float32))
        return ops.multiply(ops.multiply(x, ops.power(root, ops.constant(np.float32(-1)))), gain)

    def rope(self, x: ov.Output, heads: int) -> ov.Node:
        def ends(number: int) -> ov.Node:
            return ops.constant(np.array([number]))

        apart = ops.reshape(x, ops.constant(np.array([-1, heads, SIZE])), False)
        shaped = ops.reshape(self.norm(apart, SIZE), ops.constant(np.array([-1, heads, 1, SIZE])), False)
        second = ops.slice(shaped, ends(SIZE // 2), ends(SIZE), ends(1), ends(-1))
        first = ops.slice(shaped, ends(0), ends(SIZE // 2), ends(1), ends(-1))
        turned = ops.concat([ops.negative(second), first], -1)
        total = ops.add(ops.multiply(shaped, self.cos), ops.multiply(turned, self.sin))
        return ops.reshape(total, ops.constant(np.array([-1, heads * SIZE])), False)

    def split(self, x: ov.Node, *widths: int) -> list[ov.Output]:
        return ops.variadic_split(x, ops.constant(np.int64(-1)), ops.constant(np.array(widths))).outputs()

    def model(self) -> ov.Model:
        x: ov.Node = self.x
        for number in range(2):
            joined = self.biased(self.product(self.norm(x), HIDDEN + SIZE, HIDDEN), HIDDEN + SIZE)
            query, value = self.split(joined, HIDDEN, SIZE)
            mixed = ops.cum_sum(ops.add(self.rope(query, HEADS), ops.constant(np.float32(0.5))), np.int64(0))
            mixed = ops.concat([mixed, value], -1)
            x = ops.add(x, self.product(mixed, HIDDEN, HIDDEN + SIZE))
            gate, up = self.split(self.product(self.norm(x), 2 * INNER, HIDDEN), INNER, INNER)
            active = ops.gelu(gate, "tanh") if number else ops.multiply(gate, ops.sigmoid(gate))
            made = self.biased(self.product(ops.multiply(active, up), HIDDEN, INNER), HIDDEN)
            x = ops.add(x, self.norm(made) if number else made)
        result = self.product(self.norm(x), 40, HIDDEN)
        result.output(0).set_names({"y"})
        return ov.Model([result.output(0), x.output(0)], [self.x, self.cos, self.sin])


def inputs(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    angle = rng.random((rows, 1, 1, SIZE // 2)).astype(np.float32)
    angle = np.concatenate([angle, angle], -1)
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    return {"x": x, "cos": np.cos(angle), "sin": np.sin(angle)}
