"""`plancast inspect` and `verify`, and the drawing of one layer, on a real tiny artifact."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from tiny_artifact import write_tiny_artifact
from tiny_build import tiny_workshop
from typer.testing import CliRunner

from builder import cli
from builder.graph_svg import draw
from builder.inspect import describe, kv_bytes_by_kind, load_graphs
from builder.layer_graph import Graphs, LayerGraph, LayerNode
from builder.model_card import model_card
from runtime.artifact import Artifact
from runtime.errors import ArtifactError
from runtime.kv_layout import KvLayer, KvLayout
from runtime.manifest import BackendInfo, decode_manifest

app = typer.Typer()
cli.register(app)


@pytest.fixture(scope="module")
def artifact() -> Path:
    return tiny_workshop() / "artifact"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_holds_the_manifest_and_what_follows_from_it(artifact: Path) -> None:
    facts = json.loads(run("inspect", str(artifact), "--json"))
    derived = facts.pop("derived")
    assert facts == json.loads((artifact / "manifest.json").read_text())
    manifest = Artifact.open(artifact).manifest
    assert derived["problem"] is None
    assert derived["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, head size, f32
    assert derived["kv_bytes_per_token_by_kind"] == {"key f32": 256, "value f32": 256}
    assert derived["kv_bytes_per_block"] == 32 * derived["kv_bytes_per_token"]
    assert derived["weights_bytes"] == sum(manifest.weights_bytes.values())
    assert derived["files_bytes"] == sum(path.stat().st_size for path in artifact.iterdir()) - (
        (artifact / "manifest.json").stat().st_size
    )


def test_the_page_shows_what_matters(artifact: Path) -> None:
    text = run("inspect", str(artifact))
    manifest = Artifact.open(artifact).manifest
    for part in ("LlamaForCausalLM", "PagedAttention", "4 of 4 prompts identical", "tokens a step", "engine.", "trace"):
        assert part in text
    traced, fused = sum(manifest.operators_traced.values()), sum(manifest.operators.values())
    assert re.search(rf"in all\s+{traced}\s+{fused}", text)


def test_an_artifact_of_another_version_is_described_all_the_same(tmp_path: Path) -> None:
    backend = BackendInfo(name="openvino", version="2025.1.0", engine="engine.xml")
    folder = write_tiny_artifact(tmp_path / "old", backend=backend)
    assert "2025.1.0" in describe(folder)["derived"]["problem"]
    text = run("inspect", str(folder))
    assert "does not load here" in text
    assert "not compared" in text


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such artifact"):
        run("inspect", str(tmp_path / "nothing"))
    with pytest.raises(ArtifactError, match="no such artifact"):
        run("verify", str(tmp_path / "nothing"))


def test_verify_finds_a_changed_byte_and_tells_of_strangers(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "copy")
    (folder / "notes.md").write_text("mine")
    assert "notes.md does not belong" in run("verify", str(folder))
    facts = json.loads(run("verify", str(folder), "--json"))
    assert (facts["ok"], facts["unlisted"]) == (True, ["notes.md"])
    assert facts["files"] == len(Artifact.open(folder).manifest.files)
    data = bytearray((folder / "engine.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "engine.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"engine.bin is damaged.*plancast build tiny --force"):
        run("verify", str(folder))


def test_kv_bytes_by_kind_counts_scales() -> None:
    manifest = decode_manifest((tiny_workshop() / "artifact" / "manifest.json").read_bytes())
    layer = KvLayer(
        num_kv_heads=3, key_head_size=64, value_head_size=64, key_dtype="int8", value_dtype="int8", key_scale_bytes=8,
        value_scale_bytes=8,
    )  # fmt: skip
    manifest.kv = KvLayout(block_size=32, layers=(layer, layer))
    kinds = kv_bytes_by_kind(manifest)
    assert kinds == {"key int8": 384, "value int8": 384, "scale": 96}
    assert sum(kinds.values()) == manifest.kv.bytes_per_token


def test_the_layer_has_one_attention_and_fewer_nodes_after_fusion(artifact: Path) -> None:
    graphs = load_graphs(artifact)
    for graph in (graphs.traced, graphs.fused):
        operators = [node.op for node in graph.nodes]
        assert operators.count("PagedAttention") == 1
        assert len(graph.outputs) == 1
        for index, node in enumerate(graph.nodes):
            assert all(-len(graph.inputs) <= i < index for i in node.inputs)
    assert len(graphs.fused.nodes) < len(graphs.traced.nodes)
    weights = " ".join(weight for node in graphs.traced.nodes for weight in node.weights)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "input_layernorm"):
        assert weights.count(name) == 1
    assert not re.search(r"layers\.0|embed|lm_head", weights)


def test_the_drawing_is_an_svg_of_both_sides(artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "layer.svg"
    run("inspect", str(artifact), "--graph", str(out))
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    graphs = load_graphs(artifact)
    assert texts.count("PagedAttention") == 2
    assert f"as traced: {len(graphs.traced.nodes)} operators" in texts
    assert f"as compiled: {len(graphs.fused.nodes)} operators" in texts
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.attrib.get("x", 0)) < width
        assert 0 <= float(box.attrib.get("y", 0)) < height
    with pytest.raises(ArtifactError, match="cannot be written"):
        run("inspect", str(artifact), "--graph", str(tmp_path / "no" / "folder.svg"))


def test_the_drawing_escapes_names() -> None:
    graph = LayerGraph(
        layer=0, inputs=["<x>"], nodes=[LayerNode(op="A&B", inputs=[-1], weights=["<w> 2x2 f32"])], outputs=[0]
    )
    text = draw(Graphs(traced=graph, fused=graph), "a < b")
    ET.fromstring(text)
    assert "A&amp;B" in text


def test_an_artifact_without_a_drawing_says_so(tmp_path: Path) -> None:
    folder = write_tiny_artifact(tmp_path / "tiny")
    with pytest.raises(ArtifactError, match=r"graph.json: cannot be read"):
        run("inspect", str(folder), "--graph", str(tmp_path / "out.svg"))


def test_the_card_tells_of_hub_and_licence(artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    assert "not stated" in model_card(manifest)
    manifest.model.license = "apache-2.0"
    manifest.model.source = "hub:owner/name"
    manifest.model.revision = "abc"
    card = model_card(manifest)
    assert "license: apache-2.0\nbase_model: owner/name\n" in card
    assert "hub:owner/name at abc" in card
    manifest.parity = None
    assert "was not compared" in model_card(manifest)
