"""A complete artifact of a few hundred bytes, whose engine no backend would load: for what never opens the engine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec

from runtime.artifact import installed_plugins
from runtime.artifact_writer import ArtifactWriter
from runtime.hardware import this_machine
from runtime.kv_layout import KvLayer, KvLayout
from runtime.manifest import BackendInfo, Limits, Manifest, ModelInfo, RuntimeDefaults

FILES = {
    "engine.xml": b"<net name='tiny'/>",
    "engine.bin": bytes(range(256)),
    "engine.blob": b"\x00compiled\xff" * 3,
    "tokenizer.json": b'{"version": "1.0"}',
}


def tiny_manifest(**changes: Any) -> Manifest:
    """A manifest whose every check passes here, with `changes` to its fields."""
    layer = KvLayer(num_kv_heads=2, key_head_size=8, value_head_size=8, key_dtype="f32", value_dtype="f32")
    manifest = Manifest(
        name="tiny",
        created="2026-01-01T00:00:00+00:00",
        plancast_version="0.1.0",
        recipe={"name": "tiny"},
        recipe_hash="0" * 16,
        model=ModelInfo(
            name="tiny",
            architecture="LlamaForCausalLM",
            family="llama",
            source="folder",
            context_length=128,
            vocab_size=64,
            num_layers=2,
            hidden_size=32,
            num_parameters=1000,
        ),
        backend=BackendInfo(
            name="openvino",
            version=importlib.metadata.version("openvino"),
            engine="engine.xml",
            blob="engine.blob",
        ),
        hardware=this_machine(),
        plugins=installed_plugins(),
        kv=KvLayout(block_size=32, layers=(layer, layer)),
        limits=Limits(max_context_len=128, max_num_seqs=4, max_num_batched_tokens=64),
        defaults=RuntimeDefaults(),
        weights_bytes={"f32": 4000},
        operators={"MatMul": 7},
        operators_traced={"MatMul": 14},
        build={"seconds": {"trace": 1.0}},
    )
    return msgspec.structs.replace(manifest, **changes)


def write_tiny_artifact(folder: Path, **changes: Any) -> Path:
    """Write the artifact and return its folder."""
    with ArtifactWriter(folder) as writer:
        for name, data in FILES.items():
            (writer.path / name).write_bytes(data)
        writer.commit(tiny_manifest(**changes))
    return folder
