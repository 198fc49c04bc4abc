"""Recipes: what they say, and every way to say it wrong, each refused in one line with the way out."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.recipe import Recipe, load_recipe, recipe_from_dict, recipe_hash, recipe_to_dict
from builder.recipe_load import shipped
from runtime.errors import RecipeError

BASE = "model: /models/m\n"


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(str(path), list(overrides))


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, BASE)
    assert recipe == Recipe(name="mine", model="/models/m")
    assert (recipe.backend.compute, recipe.weights.dtype, recipe.kv.key) == ("f32", "f32", "f32")


def test_everything_said(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        """
name: full
model: hub:owner/name@v1
trust_remote_code: true
backend: {name: openvino, device: CPU, compute: bf16, dynamic_quantization_group_size: 64, num_threads: 3, blob: false}
weights: {dtype: int8, skip: ["lm_head.*"]}
kv: {key: int8, value: int8, block_size: 32}
limits: {max_context_len: 4096, max_num_seqs: 8, max_num_batched_tokens: 256}
runtime:
  kv_cache_memory: 1.5GiB
  kv_cache_memory_share: 0.25
  enable_prefix_caching: false
  scheduling_policy: priority
  ttft_slo: 1
  tpot_slo: 5e-2
quality: {max_kl: 1e-3, min_top1: 0.9, max_perplexity_ratio: 1.05}
parity: {enabled: true, prompts: 3, new_tokens: 8}
""",
    )
    assert recipe.weights.skip == ("lm_head.*",)
    assert recipe.runtime.kv_cache_memory == 3 << 29
    assert (recipe.runtime.ttft_slo, recipe.runtime.tpot_slo) == (1.0, 0.05)
    assert recipe.quality.max_kl == 0.001
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


def test_short_forms(tmp_path: Path) -> None:
    short = load(tmp_path, BASE + "weights: int8\nkv: f16\n")
    assert short == load(tmp_path, BASE + "weights: {dtype: int8}\nkv: {key: f16, value: f16}\n")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("1024", 1024), ("512MB", 512 * 10**6), ("1GiB", 1 << 30), ("'2 kib'", 2048), ("0.5GiB", 1 << 29)],
)
def test_sizes(tmp_path: Path, size: str, nbytes: int) -> None:
    assert load(tmp_path, f"{BASE}runtime: {{kv_cache_memory: {size}}}").runtime.kv_cache_memory == nbytes


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("modle: x\nmodel: y", 1, "unknown key 'modle'; allowed: name, model,.*did you mean 'model'"),
        ("backend: {nmae: openvino}", 2, "unknown key 'nmae' in 'backend'; allowed: name, device.*did you mean 'name'"),
        ("compute: bf16", 2, "unknown key 'compute'.*did you mean 'backend.compute'"),
        ("<<: {a: 1}", 2, "unknown key '<<'"),
        ("backend:\n  name: tensort", 3, "backend.name: 'tensort' is not allowed; allowed: openvino.*mean 'tensorrt'"),
        ("backend: {compute: fp32}", 2, "'fp32' is not allowed; allowed: f32, bf16, f16; did you mean 'f32'"),
        ("weights: bfloat16", 2, "weights.dtype: 'bfloat16' is not allowed.*did you mean 'bf16'"),
        ("weights: int5", 2, "weights.dtype: 'int5' is not allowed; allowed: f32, f16, bf16, int8, int4, fp8, checkp"),
        ("weights: fp8_e4m3", 2, "weights.dtype: 'fp8_e4m3' is not allowed.*did you mean 'fp8'"),
        ("weights: {dtype: int4, group_size: 48}", 2, "48 is not allowed; allowed: 32, 64, 128, channel"),
        ("weights: {dtype: int4, group_size: '32'}", 2, "'32' is not allowed; allowed: 32, 64, 128, channel"),
        ("weights: {dtype: int4, group_size: true}", 2, "true is not allowed"),
        ("weights: {dtype: int4, method: gtpq}", 2, "'gtpq' is not allowed.*did you mean 'gptq'"),
        ("weights: {dtype: int4, overrides: [int8]}", 2, "weights.overrides.0: 'int8' is text; a mapping is expected"),
        ("weights: {dtype: int4, overrides: [{dtype: int8}]}", 2, "weights.overrides.0.match: missing"),
        ("weights:\n  dtype: int4\n  overrides:\n  - {match: a, dtype: int9}", 5, "overrides.0.dtype: 'int9' is not"),
        ("weights: {dtype: int4, damping: 0}", 2, "weights.damping: 0 is out of range"),
        ("weights: 8", 2, "weights: 8 is an integer; a mapping is expected"),
        ("kv: null", 2, "kv: null is null; a mapping is expected"),
        ("kv: [f32]", 2, "kv: .* is a list; a mapping is expected"),
        ("weights: {skip: lm_head}", 2, "weights.skip: 'lm_head' is text; a list is expected"),
        ("weights: {dtype: int8, skip: [1]}", 2, "weights.skip.0: 1 is an integer; text is expected; put it in quotes"),
        ("limits: {max_num_seqs: many}", 2, "limits.max_num_seqs: 'many' is text; an integer is expected"),
        ("limits: {max_num_seqs: 1.0}", 2, "1.0 is a number; an integer is expected"),
        ("limits: {max_num_seqs: true}", 2, "true is a boolean; an integer is expected"),
        ("limits: {max_num_seqs: 0}", 2, "0 is out of range; it must be at least 1"),
        ("limits: {max_context_len: -5}", 2, "-5 is out of range"),
        ("limits: {max_context_len: 99999999999999999999}", 2, "out of range"),
        (f"limits: {{max_context_len: {'9' * 5000}}}", 2, "is too large"),
        ("limits: {max_context_len: null}", 2, "null is null; an integer is expected"),
        ("runtime: {kv_cache_memory_share: 0}", 2, "out of range; it must be more than 0 and at most 1"),
        ("runtime: {kv_cache_memory_share: 1.01}", 2, "out of range"),
        ("runtime: {kv_cache_memory_share: .nan}", 2, "a finite number is expected"),
        ("runtime: {ttft_slo: .inf}", 2, "a finite number is expected"),
        ("runtime: {ttft_slo: 1e999}", 2, "a finite number is expected"),
        ("runtime: {ttft_slo: 0}", 2, "more than 0"),
        ("runtime: {ttft_slo: fast}", 2, "'fast' is text; a number .or null. is expected"),
        ("runtime: {kv_cache_memory: 1GB2}", 2, "'1GB2' is not a size"),
        ("runtime: {kv_cache_memory: -1}", 2, "out of range"),
        ("runtime: {kv_cache_memory: 0B}", 2, "above zero"),
        ("runtime: {kv_cache_memory: 999999TiB}", 2, "out of range"),
        ("runtime: {kv_cache_memory: 1.5}", 2, "1.5 is a number; an integer .or null. is expected"),
        ("runtime: {enable_prefix_caching: yes}", 2, "'yes' is text; true or false is expected"),
        ("runtime: {scheduling_policy: fifo}", 2, "allowed: fcfs, priority"),
        ("quality: {min_top1: 1.5}", 2, "more than 0 and at most 1"),
        ("quality: {max_kl: -0.1}", 2, "more than 0"),
        ("quality: {max_perplexity_ratio: 0.9}", 2, "at least 1"),
        ("name: ../evil", 2, "name: '../evil' is not allowed"),
        ("name: 12", 2, "name: 12 is an integer; text is expected; put it in quotes"),
        ("name: ''", 2, "is not allowed"),
        ("model: ''\nweights: f32\nmodel2: 1", 2, "key 'model' is given twice"),
        ("trust_remote_code: 1", 2, "1 is an integer; true or false is expected"),
        ("extends: [a]", 2, "extends: the name or path of one recipe is expected"),
        ("extends: nowhere", 2, "extends: no recipe 'nowhere'; shipped: "),
        ("extends: ./nowhere.yaml", 2, "extends: no recipe file at "),
        ("kv: {key: f32\nvalue: f32}", 3, "not valid YAML"),
        ("a: b: c", 2, "not valid YAML: mapping values are not allowed here"),
        ("x: !!python/object/apply:os.system ['true']", 2, "a YAML tag"),
        ("kv: &a {key: f32}\nweights: *a", 3, "a YAML alias"),
        ("a: *nowhere", 2, "not valid YAML: found undefined alias"),
        ("? [a, b]\n: c", 2, "a key must be a word"),
        ("--- {}", 2, "expected a single document in the stream, but found another document"),
        ("\tname: x", 2, "not valid YAML"),
    ],
)  # fmt: skip
def test_refused_with_the_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    text = text if text.startswith("modle") else BASE + text
    message = refusal(tmp_path, text)
    first = message.splitlines()[0]
    assert first.startswith(f"{tmp_path / 'mine.yaml'}:{line}: "), message
    assert re.search(words, first), message
    assert len(first) < 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a recipe is a mapping of keys to values, not null"),
        (b"- a\n", "a recipe is a mapping of keys to values, not a list"),
        (b"just text", "not text"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"model: \x07", "not valid YAML"),
        (b"[" * 500, "not valid YAML|nested"),
        (b"a: " + b"[" * 100 + b"]" * 100, "nested deeper than 20 levels"),
        (b"a: " + b"[" * 500 + b"]" * 500, "nested too deeply"),
        (b"#" * (2 << 20), "2097152 bytes; a recipe takes 1048576 at most"),
        (b"weights: int8\n", "model: missing; set it, or pass --set model=VALUE"),
    ],
)
def test_no_recipe_at_all(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=words):
        load_recipe(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        # What OpenVINO's paged attention does with each pair was measured: builder/recipe_check.py.
        ("backend: {attention: openvino}\nkv: bf16", "kv.key", "bf16 is impossible with backend.compute f32.*f32, f16"),
        ("backend: {compute: bf16, attention: openvino}\nkv: f16", "kv.value", "f16 is impossible .* bf16.*bf16, int8"),
        ("backend: {compute: bf16, attention: openvino}", "kv.key", "f32 is impossible with backend.compute bf16"),
        ("backend: {attention: openvino}\nkv: int4", "kv.key", "int4 is impossible.* set backend.attention to native"),
        ("backend: {attention: openvino}\nkv: {rotate: key}", "kv.rotate", "key is impossible"),
        ("backend: {attention: openvino}\nkv: {skip_layers: [1]}", "kv.skip_layers", "is impossible"),
        ("backend: {compute: f16}\nkv: f16", "backend.compute", "f16 is not computed by openvino on a CPU"),
        ("backend: {attention: openvino}\nkv: {key: int8}", "kv.value", "f32 is impossible beside kv.key int8"),
        ("kv: {key: int8, value: int8, scales: static}", "kv.scales", "static is impossible with a KV cache in int8"),
        ("kv: {block_size: 16}", "kv.block_size", "16 is impossible on openvino; allowed: 32"),
        ("backend: {dynamic_quantization_group_size: 32}", "backend.dynamic", "no effect on f32 weights"),
        ("backend: {dynamic_quantization_group_size: 33}", "backend.dynamic", "0, or a multiple of 32"),
        ("weights: {skip: [a]}", "weights.skip", "weights.dtype f32 quantizes none"),
        ("weights: {method: gptq}", "weights.method", "gptq quantizes, and weights.dtype f32 does not"),
        ("weights: {dtype: bf16, group_size: 32}", "weights.group_size", "no effect on bf16"),
        ("weights: {dtype: fp8, symmetric: false}", "weights.symmetric", "impossible with fp8"),
        ("weights: {dtype: fp8, method: gptq}", "weights.method", "fp8 has no even grid"),
        ("weights: {dtype: int8, mixed: {max_bits: 5}}", "weights.mixed", "weights.dtype is int8; set it to int4"),
        ("weights: {dtype: int4, mixed: {max_bits: 5, max_kl: 1}}", "weights.mixed", "give one of them"),
        (
            "weights: {dtype: int8, smooth: 0.5}\nbackend: {dynamic_quantization_group_size: 0}",
            "weights.smooth",
            "dynamic_quantization_group_size 0 turns off",
        ),
        ("weights: {dtype: int4, overrides: [{match: a}]}", "weights.overrides.0", "overrides nothing"),
        ("weights: {dtype: checkpoint, overrides: [{match: a, dtype: int8}]}", "weights.overrides.0", "as they are"),
        ("weights: {overrides: [{match: a, group_size: 32}]}", "weights.overrides.0", "no effect on f32"),
        ("limits: {max_num_seqs: 600}", "limits.max_num_batched_tokens", "512 is less than limits.max_num_seqs 600"),
        ("limits: {max_context_len: 32}", "parity.new_tokens", "do not fit in limits.max_context_len 32"),
        ("quality: {max_kl: 0.1}\nparity: {enabled: false}", "quality.max_kl", "0.1 cannot be enforced"),
        ("backend: {name: torch, strip_weights: true}", "backend.strip_weights", "has no effect on torch"),
        (
            "backend: {name: tensorrt_rtx, weight_streaming: true}",
            "backend.weight_streaming",
            "has no effect on tensorrt_rtx",
        ),
        ("backend: {name: torch, compute_capabilities: [SM90]}", "backend.compute_cap", "has no effect on torch"),
        ("backend: {name: tensorrt_rtx, compute_capabilities: [SM90]}", "backend.compute_cap", "SM90 .*allowed: SM75"),
        ("backend: {name: tensorrt}", "backend.compute_cap", "nothing is not what a tensorrt engine is for"),
        ("backend: {name: tensorrt, device: CPU}", "backend.device", "CPU is impossible on tensorrt; set it to CUDA"),
        ("backend: {name: tensorrt}\nkv: {rotate: key}", "kv.rotate", "key is not computed by tensorrt"),
        ("backend: {name: tensorrt_rtx, strip_weights: true}", "parity.enabled", "without weights do not run"),
    ],
)
def test_impossible_combinations(tmp_path: Path, text: str, key: str, words: str) -> None:
    lines = refusal(tmp_path, BASE + text).splitlines()
    assert any(f": {key}" in line and re.search(words, line) for line in lines), lines


def test_an_impossible_combination_names_the_line_of_its_key(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE + "\n\nlimits:\n  max_num_seqs: 64\n  max_num_batched_tokens: 8\n")
    assert message.startswith(f"{tmp_path / 'mine.yaml'}:6: limits.max_num_batched_tokens: 8 is less")


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "modle: x\nweights: int9\nlimits:\n  max_num_seqs: -1\n")
    assert [line.split(":")[1] for line in message.splitlines()] == ["1", "2", "4"]


@pytest.mark.parametrize("name", [n for n in shipped() if n != "local"])
def test_shipped_recipes_load(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.model == "smollm2-135m-instruct"


def test_the_exact_recipe_is_f32_throughout() -> None:
    recipe = load_recipe("smollm2-135m-cpu-f32")
    assert {recipe.backend.compute, recipe.weights.dtype, recipe.kv.key, recipe.kv.value} == {"f32"}


def test_the_template(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="model: missing"):
        load_recipe("local")
    assert load_recipe("local", [f"model={tmp_path}", "name=my-engine"]).name == "my-engine"


def test_the_demos_recipe_says_every_key() -> None:
    """It is what users copy: a key added to `Recipe` must be explained there."""
    from builder.recipe_load import RECIPES
    from builder.recipe_yaml import read_yaml

    said = read_yaml(RECIPES / "smollm2-135m-cpu.yaml").plain()
    for field in msgspec.structs.fields(Recipe):
        if field.name == "name":
            continue
        assert field.name in said
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            assert set(said[field.name]) == set(field.type.__struct_fields__), field.name


def test_hash_is_of_what_is_said_not_how(tmp_path: Path) -> None:
    a = load(tmp_path, BASE + "weights: int8\nkv: f16\nruntime: {kv_cache_memory: 1GiB}\n")
    b = load(
        tmp_path,
        "# note\nruntime: {kv_cache_memory: 1073741824}\n" + BASE + "kv: {value: f16, key: f16}\n",
        "weights=int8",
    )
    assert recipe_hash(a) == recipe_hash(b)
    assert recipe_hash(a) != recipe_hash(load(tmp_path, BASE + "weights: int8\nkv: f16\n"))
    assert len(recipe_hash(a)) == 64


def test_speculation_in_short_and_at_length(tmp_path: Path) -> None:
    assert load(tmp_path, BASE).speculation.method == ()
    assert load(tmp_path, BASE + "speculation: ngram\n").speculation.method == ("ngram",)
    config = load(tmp_path, BASE + "speculation: {method: [suffix, ngram], num_speculative_tokens: 3}\n").speculation
    assert config.method == ("suffix", "ngram")
    assert config.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speculation: telepathy\n", "allowed: ngram, suffix, draft_model"),
        ("speculation: {method: draft_model}\n", "needs `model`"),
        ("speculation: {method: ngram, num_speculative_tokens: 0}\n", "at least 1"),
        ("speculation: {method: ngram, prompt_lookup_min: 7}\n", "prompt_lookup_max"),
    ],
)
def test_speculation_that_cannot_be(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        load(tmp_path, BASE + text)


def test_a_dict_of_another_version_is_refused() -> None:
    value = recipe_to_dict(Recipe(name="a", model="m"))
    with pytest.raises(RecipeError, match="not a recipe that this version understands"):
        recipe_from_dict({**value, "telepathy": {}})


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just("int8"),
    st.just("1GiB"),
)
_KEYS = st.sampled_from(["model", "name", "backend", "weights", "kv", "limits", "dtype", "compute", "runtime", "x", ""])
_VALUES = st.recursive(
    _SCALARS, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(_KEYS, v, max_size=4)), max_leaves=8
)


@settings(max_examples=120, deadline=None)
@given(value=_VALUES)
def test_any_yaml_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    import yaml

    path = tmp_path_factory.mktemp("fuzz") / "f.yaml"
    path.write_text(yaml.safe_dump(value, allow_unicode=True), encoding="utf-8")
    try:
        recipe = load_recipe(str(path))
    except RecipeError:
        return
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


@settings(max_examples=120, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(RecipeError):
        load_recipe(str(path))
    with contextlib.suppress(RecipeError):
        load_recipe("smollm2-135m-cpu", [text])
