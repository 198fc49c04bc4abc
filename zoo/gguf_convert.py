"""GGUF file -> Hugging Face style folder: weights dequantized exactly to f32, config, tokenizer, chat template.

The quantized values themselves lie beside them (`zoo.formats.side_file`).

The tensor names, permutations and the config come from transformers; what its conversion gets silently wrong is
mended or refused here: unknown pre-tokenizers, RoPE scaling that only the GGUF states, weights left at random.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import ZooError
from zoo.formats.gguf_import import import_gguf
from zoo.gguf_header import GgufHeader
from zoo.progress import Progress, forwarding_tqdm
from zoo.store import require_disk, require_memory

VERSION = 2  # raise it whenever the same file would give another folder

# Byte-level BPE vocabularies by `tokenizer.ggml.pre`: those that split digits one by one before GPT-2's pattern, and
# those that use GPT-2's pattern alone (llama.cpp, src/llama-vocab.cpp). transformers handles further names itself.
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"gpt-2", "olmo", "jais", "phi-2", "mpt", "dolma"}

_CONFIG_NOISE = ("_name_or_path", "_model_name_or_path", "transformers_version")
_TOKENIZER_NOISE = ("is_local", "local_files_only", "name_or_path")


def convert(header: GgufHeader, folder: Path, progress: Progress) -> None:
    """Write config.json, model.safetensors (f32), the quantized weights, tokenizer and chat template into `folder`.

    Raises `ZooError` where memory or disk do not suffice, or the architecture or tokenizer cannot be converted.
    """
    payload = header.num_elements * 4 + header.path.stat().st_size
    what = f"the f32 copy of {header.path.name}"
    require_disk(folder, payload, what)
    require_memory(payload * 2 + (512 << 20), f"dequantizing {header.path.name}")
    _check_tokenizer(header)
    with _quiet_transformers(progress):
        config = _write_weights(header, folder)
        import_gguf(header, folder, progress)
        _write_tokenizer(header, folder)
    _write_generation_config(header, folder, config)


def _write_weights(header: GgufHeader, folder: Path) -> dict[str, Any]:
    try:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig
    except ImportError as error:
        raise _no_build_extra(error) from None
    try:
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            str(header.path.parent),
            gguf_file=header.path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise ZooError(
            f"{header.path}: the GGUF architecture {header.architecture!r} cannot be converted ({_one_line(error)}); "
            "use the model's original repository in safetensors form"
        ) from None
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            raise ZooError(
                f"{header.path}: {kind.replace('_', ' ')} after the conversion ({len(names)}, first {names[0]}), so "
                "the model would be wrong; use the model's original repository in safetensors form"
            )
    try:
        model.save_pretrained(str(folder), max_shard_size="1TB")
    except Exception as error:  # safetensors' own error is no OSError
        raise ZooError(f"cannot write the f32 copy of {header.path.name} ({_one_line(error)})") from None
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in _CONFIG_NOISE}
    config = _shortest_floats(config, _f32_values(header))
    _check_rope(header, config)
    _write_json(path, config)
    return config


def _check_rope(header: GgufHeader, config: dict[str, Any]) -> None:
    """RoPE scaling that the file states and the converted config lacks would be dropped in silence."""
    rope = config.get("rope_parameters") or {}
    kinds = {entry.get("rope_type", "default") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    stated = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    tables = [tensor.name for tensor in header.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if kinds <= {"default"} and (stated not in ("none", "") or tables):
        cause = f"the tensor {tables[0]}" if tables else f"rope.scaling.type {stated!r}"
        raise ZooError(
            f"{header.path}: its RoPE scaling ({cause}) would be lost in the conversion; "
            "use the model's original repository in safetensors form"
        )


def _check_tokenizer(header: GgufHeader) -> None:
    """Refuse a byte-level vocabulary whose splitting rule nobody here knows: it would tokenize wrongly, in silence."""
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    rule = header.metadata.get("tokenizer.ggml.pre")
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise _no_build_extra(error) from None
    if rule not in _DIGITS_THEN_GPT2 and rule not in _GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ZooError(
            f"{header.path}: its pre-tokenizer is {rule!r}, which is not known, so text would be split wrongly; "
            "use the model's original repository in safetensors form"
        )


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name, local_files_only=True
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise ZooError(f"{header.path}: its tokenizer cannot be converted ({_one_line(error)})") from None
    tokenizer.save_pretrained(str(folder))
    if header.metadata.get("tokenizer.ggml.pre") in _DIGITS_THEN_GPT2:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
        _write_json(path, content)
    path = folder / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key not in _TOKENIZER_NOISE}
    if settings.get("tokenizer_class") == "TokenizersBackend":  # the name that older readers know as well
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if header.context_length:
        settings["model_max_length"] = header.context_length
    _write_json(path, settings)


def _write_generation_config(header: GgufHeader, folder: Path, config: dict[str, Any]) -> None:
    """Token ids alone; the ends of a turn and of a message end a generation as well."""
    ends = config.get("eos_token_id")
    ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    for name in ("eos", "eot", "eom"):
        token = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and token not in ids:
            ids.append(token)
    settings = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    if ids:
        settings["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    _write_json(folder / "generation_config.json", settings)


def _f32_values(header: GgufHeader) -> set[float]:
    return {value for value in header.metadata.values() if isinstance(value, float)}


def _shortest_floats(value: Any, f32_values: set[float]) -> Any:
    """Spell the file's f32 values with the fewest digits that give the same f32: 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    if isinstance(value, dict):
        return {key: _shortest_floats(item, f32_values) for key, item in value.items()}
    if isinstance(value, float) and value in f32_values:
        return float(str(np.float32(value)))
    return value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _no_build_extra(error: ImportError) -> ZooError:
    return ZooError(f"converting a GGUF file needs the build extra ({error}): pip install 'plancast[build]'")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


@contextlib.contextmanager
def _quiet_transformers(progress: Progress) -> Iterator[None]:
    """Send the conversion's own progress to `progress`, and nothing of it to the terminal."""
    import transformers.modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), getattr(loader, "tqdm", None)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loader.tqdm = forwarding_tqdm(progress, "dequantizing tensors")  # type: ignore[assignment]
    try:
        yield
    finally:
        loader.tqdm = bar  # type: ignore[assignment]
        logging.enable_progress_bar()
        logging.set_verbosity(verbosity)
