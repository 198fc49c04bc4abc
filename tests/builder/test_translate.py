"""From an exported program to ONNX: the short way, and when the long one is taken."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnx.reference import ReferenceEvaluator  # noqa: E402

from builder.tracing.translate import to_onnx  # noqa: E402  (needs torch)


class Plain(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x.to(torch.float32)).contiguous() * x.to(torch.int64).to(torch.float32)


class InPlace(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        y.add_(1)
        return y * x


class Untranslatable(torch.nn.Module):
    """`aten.rot90` has no translation of its own: it has to be broken up."""

    def forward(self, x):
        return torch.rot90(x, 1, [0, 1]) * 2


@pytest.mark.parametrize(("module", "decompositions"), [(Plain, 0), (InPlace, 1), (Untranslatable, 1)])
def test_the_graph_computes_what_the_module_does_and_decomposes_only_where_it_must(module, decompositions, monkeypatch):
    calls = []
    decompose = torch.export.ExportedProgram.run_decompositions

    def counted(self, *args, **kwargs):
        calls.append(self)
        return decompose(self, *args, **kwargs)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    x = torch.randn(3, 3) * 4
    expected = module()(x.clone()).numpy()
    program = torch.export.export(module(), (x,), strict=False)
    graph = to_onnx(program)
    assert len(calls) == decompositions
    session = ReferenceEvaluator(graph.model_proto)
    (out,) = session.run(None, {session.input_names[0]: x.numpy()})
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
