"""A trace's signature, weights and refusal of tokens that mix."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_steps import OnnxSteps, hf_logits, largest_difference
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, tiny_config, write_tiny_checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP

from builder.passes.graph import dims
from builder.trace import trace
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.op import INPUTS, VERSION
from runtime.errors import BuildError

CONTEXT = 32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, ir.Model]:
    folder = tmp_path_factory.mktemp("llama")
    model = write_tiny_checkpoint("llama-tied-bias", folder)
    return folder, model, trace(open_tiny_checkpoint(folder), max_context_len=CONTEXT)


def test_signature(llama) -> None:
    _, _, graph = llama
    inputs = {value.name: (dims(value), value.dtype) for value in graph.graph.inputs}
    i64, i32, f32 = ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT
    cache = ("num_blocks", 2, 32, 8)
    assert inputs == {
        "input_ids": (("T",), i64),
        "position_ids": (("T",), i64),
        "logits_rows": (("R",), i64),
        "past_lens": (("B",), i32),
        "query_starts": (("B + 1",), i32),
        "block_ids": (("N",), i32),
        "block_starts": (("B + 1",), i32),
        "max_context_len": ((), i32),
        **{f"{kind}_cache.{layer}": (cache, f32) for layer in (0, 1) for kind in ("key", "value")},
    }
    (logits,) = graph.graph.outputs
    assert (logits.name, dims(logits), logits.dtype) == ("logits", ("R", VOCAB_SIZE), f32)
    assert graph.opset_imports == {"": 23, "plancast": VERSION}


def test_attention_nodes(llama) -> None:
    _, _, graph = llama
    for layer, node in enumerate(attention_nodes(graph)):
        names = [value.name if value is not None else None for value in node.inputs]
        assert names[3:] == [f"key_cache.{layer}", f"value_cache.{layer}", *INPUTS[5:10]]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        assert attributes == {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": 8,
            "v_head_size": 8,
            "scale": pytest.approx(8**-0.5),
            "sliding_window": 0,
            "softcap": 0.0,
            "kv_dtype": "f32",
            "block_size": 32,
            "group_size": 32,
            "rotate": "none",
            "key_scale": 0.0,
            "value_scale": 0.0,
            "layer": layer,
        }
        assert [dims(value) for value in node.outputs] == [("T", 32)]


def test_the_onnx_checker_knows_our_operator(llama, tmp_path: Path) -> None:
    _, _, graph = llama
    ir.save(graph, tmp_path / "model.onnx", external_data="model.data")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    proto = onnx.load(tmp_path / "model.onnx")
    node = next(node for node in proto.graph.node if node.op_type == "PagedAttention")
    del node.attribute[[attribute.name for attribute in node.attribute].index("scale")]
    with pytest.raises(onnx.checker.ValidationError, match="scale"):
        onnx.checker.check_model(proto)


def test_weights_stay_in_the_files_under_their_own_names(llama) -> None:
    folder, model, graph = llama
    weights = {name: value.const_value for name, value in graph.graph.initializers.items() if ".weight" in name}
    assert "model.embed_tokens.weight" in weights  # tied: one initializer for both
    assert "lm_head.weight" not in weights
    named = dict(model.named_parameters())
    assert weights.keys() == {name for name in named if name.endswith("weight")}
    for name, tensor in weights.items():
        assert isinstance(tensor, ir.ExternalTensor)
        assert Path(tensor.path) == (folder / "model.safetensors").resolve()
        np.testing.assert_array_equal(tensor.numpy(), named[name].detach().numpy())


def test_a_symlinked_checkpoint_is_resolved(llama, tmp_path: Path) -> None:
    """The hub's cache is links; every ONNX loader refuses a link."""
    folder, _, _ = llama
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    tensor = graph.graph.initializers["model.norm.weight"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert not Path(tensor.path).is_symlink()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_as_f32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_tiny_checkpoint("qwen2", tmp_path, dtype=dtype)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    assert {value.dtype for value in graph.graph.initializers.values()} <= {ir.DataType.FLOAT, ir.DataType.INT64}
    assert largest_difference(graph, model, VOCAB_SIZE) < 2e-5


def test_several_weight_files(tmp_path: Path) -> None:
    model = write_tiny_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    assert largest_difference(graph, model, VOCAB_SIZE) < 2e-5


@pytest.mark.parametrize("kind", ["short", "long"])
def test_longrope_takes_the_table_of_the_longest_context(kind: str, tmp_path: Path) -> None:
    """transformers picks the table by the longest position of a call: here all calls lie on one side of the border."""
    border = 32 if kind == "short" else 8
    rope = dict(tiny_config("phi3-longrope").rope_parameters, original_max_position_embeddings=border)
    model = write_tiny_checkpoint(
        "phi3-longrope", tmp_path, rope_parameters=rope, original_max_position_embeddings=border
    )
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, 20).tolist()
    expected = hf_logits(model, tokens)
    run = OnnxSteps(graph)
    got = np.concatenate([run.step({"a": tokens[:7]}), run.step({"a": tokens[7:]})])
    assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


def test_more_than_two_gigabytes_of_weights(tmp_path: Path) -> None:
    """Case 26. Sparse files: the tensors are declared, and only their last bytes are written."""
    config = tiny_config("llama", vocab_size=300_000, hidden_size=1024, num_attention_heads=16, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        shapes = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    assert offset > 2**31
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
        for entry in header.values():  # the last element of each is 1
            file.seek(8 + len(text) + entry["data_offsets"][1] - 4)
            file.write(struct.pack("<f", 1.0))

    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    ir.save(graph, tmp_path / "model.onnx")  # beside the weights, which it refers to
    assert (tmp_path / "model.onnx").stat().st_size < 1 << 20
    onnx.checker.check_model(tmp_path / "model.onnx")
    loaded = ir.load(tmp_path / "model.onnx")
    for name, shape in shapes.items():
        tensor = loaded.graph.initializers[name].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        array = tensor.numpy()  # mapped, not read
        assert (array.shape, array.flat[-1]) == (shape, 1.0)


@pytest.mark.parametrize(
    ("mix", "operator"),
    [
        (lambda x: torch.cumsum(x, 1), "CumSum"),
        (lambda x: x.mean(1, keepdim=True) + 0 * x, "ReduceMean"),
        (lambda x: x.softmax(1), "Softmax"),
        (lambda x: (x @ x.transpose(1, 2)) @ x, "MatMul"),
        (lambda x: x[:, :1] + 0 * x, ""),
        (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), ""),
        (lambda x: torch.conv1d(x.transpose(1, 2), torch.ones(x.shape[-1], 1, 3), padding=1, groups=32).mT, "Conv"),
        (lambda x: x * torch.arange(x.shape[1])[None, :, None], ""),
        (lambda x: torch.layer_norm(x.mT, [7]).mT if isinstance(x.shape[1], int) else x.sort(1).values, ""),
    ],
)
def test_an_operator_that_mixes_tokens_is_refused(mix, operator: str, tmp_path: Path, monkeypatch) -> None:
    write_tiny_checkpoint("llama", tmp_path)
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + mix(x))
    with pytest.raises(BuildError) as caught:
        trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    message = str(caught.value)
    assert operator in message
    assert "token" in message or "traced" in message


@pytest.mark.parametrize("work", [lambda x: x.sort(-1).values, lambda x: x.cumsum(-1), lambda x: x.flip(-1)])
def test_an_operator_within_a_token_is_traced_right_or_refused_as_unknown(work, tmp_path: Path, monkeypatch) -> None:
    model = write_tiny_checkpoint("llama", tmp_path)
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) + work(x))
    refusal, graph = None, None
    try:
        graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    except BuildError as error:
        refusal = str(error)
    if graph is not None:
        assert largest_difference(graph, model, VOCAB_SIZE) < 2e-5
    else:
        assert "not known" in (refusal or "")


def test_the_mask_functions_are_put_back(llama) -> None:
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama import modeling_llama

    assert modeling_llama.create_causal_mask is create_causal_mask


def test_a_cast_weight_is_read_anew_each_time(tmp_path: Path) -> None:
    """Nothing is kept: peak memory is one tensor."""
    write_tiny_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=CONTEXT)
    tensor = graph.graph.initializers["model.layers.0.mlp.up_proj.weight"].const_value
    assert isinstance(tensor, ir.LazyTensor)
    assert tensor.numpy() is not tensor.numpy()
