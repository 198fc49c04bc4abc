"""`plancast::PagedAttention`: the names that everything else agrees on, and the ONNX schema.

The NumPy reference, which is the truth that every kernel is tested against, stands in `reference.py`.
"""

from __future__ import annotations

DOMAIN = "plancast"
OP_TYPE = "PagedAttention"
VERSION = 2
INPUTS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "past_lens",
    "query_starts",
    "block_ids",
    "block_starts",
    "max_context_len",
    "sinks",
    "alibi_slopes",
)
OUTPUTS = ("attention",)

DOC = """Causal attention of flat, unpadded tokens over a paged key/value cache that it updates in place.

The tokens of `B` sequences lie end to end: sequence `b` owns rows `query_starts[b]` to `query_starts[b + 1]` of
`query [T, num_heads * head_size]`, `key [T, num_kv_heads * head_size]` and `value [T, num_kv_heads * v_head_size]`.
Its blocks are `block_ids[block_starts[b]:block_starts[b + 1]]`, and `past_lens[b]` of its tokens are cached already.
The new keys and values are written to their blocks, then row `i` of the sequence attends to its first
`past_lens[b] + i + 1` tokens (to the last `sliding_window` of them if that is > 0). Scores are `scale * q.k`, passed
through `softcap * tanh(score / softcap)` if `softcap` > 0, plus `alibi_slopes[h] * (key - query position)`; `sinks[h]`
joins the softmax as one more score that has no value. How cells are stored is what `kv_dtype`, `group_size`, `rotate`
and the static scales say (`kv_formats.py`)."""

_T = "tensor(float)", "tensor(float16)", "tensor(bfloat16)"
_CACHE = (*_T, "tensor(int8)", "tensor(uint8)", "tensor(float8e4m3fn)", "tensor(float8e5m2)")
# input -> (type parameter or type, what it holds); the optional ones come last.
_INPUT_TYPES = {
    "query": ("T", "[T, num_heads * head_size], rotary embedding applied"),
    "key": ("T", "[T, num_kv_heads * head_size], rotary embedding applied"),
    "value": ("T", "[T, num_kv_heads * v_head_size]"),
    "key_cache": ("C", "[num_blocks, num_kv_heads, block_size, head_size], updated in place"),
    "value_cache": ("C", "[num_blocks, num_kv_heads, block_size, v_head_size], updated in place"),
    "past_lens": ("tensor(int32)", "[B] tokens already cached"),
    "query_starts": ("tensor(int32)", "[B + 1] first row of each sequence, and T"),
    "block_ids": ("tensor(int32)", "[N] blocks of all the sequences"),
    "block_starts": ("tensor(int32)", "[B + 1] first entry of each sequence in block_ids, and N"),
    "max_context_len": ("tensor(int32)", "[] the longest past_lens[b] + new tokens of the step"),
    "sinks": ("T", "[num_heads] score of each head's attention sink"),
    "alibi_slopes": ("T", "[num_heads] ALiBi slope of each head"),
}
_REQUIRED = 10


def register_onnx_schema() -> None:
    """Register the operator's schema (with type and shape inference) in `onnx.defs`. Does nothing the second time.

    From then on `onnx.checker` and `onnx.shape_inference` know the operator.
    """
    import onnx
    from onnx.defs import OpSchema

    if onnx.defs.has(OP_TYPE, VERSION, DOMAIN):
        return
    option, single = OpSchema.FormalParameterOption, OpSchema.FormalParameterOption.Single
    inputs = [
        OpSchema.FormalParameter(name, type_, doc, param_option=single if i < _REQUIRED else option.Optional)
        for i, (name, (type_, doc)) in enumerate(_INPUT_TYPES.items())
    ]
    outputs = [OpSchema.FormalParameter(OUTPUTS[0], "T", "[T, num_heads * v_head_size]")]

    def attribute(name: str, default: int | float | str | None, doc: str) -> OpSchema.Attribute:
        if default is None:
            return OpSchema.Attribute(name, OpSchema.AttrType.INT, doc, required=True)
        return OpSchema.Attribute(name, onnx.helper.make_attribute(name, default), doc)

    schema = OpSchema(
        OP_TYPE,
        DOMAIN,
        VERSION,
        doc=DOC,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[("T", list(_T), "activations"), ("C", list(_CACHE), "cache cells, as kv_dtype says")],
        attributes=[
            attribute("num_heads", None, "query heads"),
            attribute("num_kv_heads", None, "key and value heads; divides num_heads"),
            attribute("head_size", None, "elements of a key (and query) head"),
            attribute("v_head_size", None, "elements of a value head"),
            OpSchema.Attribute("scale", OpSchema.AttrType.FLOAT, "factor on q.k", required=True),
            attribute("sliding_window", 0, "tokens a row sees, itself included; 0: all"),
            attribute("softcap", 0.0, "bound of the scores; 0: none"),
            attribute("kv_dtype", "f32", "f32, f16, bf16, int8, int4, fp8_e4m3 or fp8_e5m2; or key:value"),
            attribute("group_size", 32, "int4: elements that share a scale"),
            attribute("rotate", "none", "none, key, value, both: stored after a Walsh-Hadamard transform"),
            attribute("key_scale", 0.0, "fp8 keys: one static scale; 0: a scale a token and head"),
            attribute("value_scale", 0.0, "the same of values"),
            attribute("block_size", 32, "tokens a block"),
            attribute("layer", None, "index of the layer, and of its caches"),
        ],
    )
    schema.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(schema)


def _infer(context) -> None:
    """Output `attention`: the query's element type, `[T, num_heads * v_head_size]`."""
    import onnx

    query = context.get_input_type(0)
    if query is None or not query.HasField("tensor_type"):
        return
    output = onnx.TypeProto()
    output.tensor_type.elem_type = query.tensor_type.elem_type
    tokens = output.tensor_type.shape.dim.add()
    if query.tensor_type.HasField("shape"):
        tokens.CopyFrom(query.tensor_type.shape.dim[0])
    width = context.get_attribute("num_heads").i * context.get_attribute("v_head_size").i
    output.tensor_type.shape.dim.add().dim_value = width
    context.set_output_type(0, output)
