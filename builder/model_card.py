"""The model card inside an artifact: README.md, for whoever finds the folder."""

from __future__ import annotations

from runtime.manifest import EmbeddingInfo, Manifest, Parity
from runtime.memory import format_size


def model_card(manifest: Manifest) -> str:
    """The card as Markdown, with the front matter that model hubs read."""
    model, backend, limits = manifest.model, manifest.backend, manifest.limits
    weights = ", ".join(f"{kind} {format_size(size)}" for kind, size in manifest.weights_bytes.items())
    layer = manifest.kv.layers[0]
    kv = layer.key_dtype if layer.key_dtype == layer.value_dtype else f"{layer.key_dtype}/{layer.value_dtype}"
    facts = [
        ("model", f"{model.name} ({model.architecture}, {model.num_parameters:,} parameters)"),
        ("source", model.source + (f" at {model.revision}" if model.revision else "")),
        ("SHA-256 of the source weights", f"`{model.sha256}`" if model.sha256 else "not known"),
        ("licence", model.license or "not stated by the source; ask whoever published the model"),
        ("backend", f"{backend.name} {backend.version}, {backend.device}"),
        ("machine", " ".join([manifest.hardware.machine, *manifest.hardware.isa])),
        ("weights", weights),
        ("KV cache", f"{kv}, {format_size(manifest.kv.bytes_per_token)} a token, blocks of {manifest.kv.block_size}"),
        ("context", f"{limits.max_context_len} tokens (the model: {model.context_length})"),
        ("limits", f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens a step"),
        ("built", f"{manifest.created} by plancast {manifest.plancast_version}"),
    ]
    lines = ["---"]
    if model.license:
        lines.append(f"license: {model.license}")
    if model.source.startswith("hub:"):
        lines.append(f"base_model: {model.source.removeprefix('hub:')}")
    lines += [
        "library_name: plancast",
        "---",
        "",
        f"# {manifest.name}",
        "",
        f"An engine that plancast built from {model.name}. It needs no network and no source model:",
        "",
        *([] if manifest.embedding else [f"    plancast generate {manifest.name} --chat 'Hello!'"]),
        f"    plancast serve {manifest.name}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts),
        "",
        "The weights remain under the licence of the model they were made from.",
        "",
        *(_parity(manifest.parity) if manifest.embedding is None else _embedding(manifest.embedding)),
        f"`plancast inspect` shows more, `plancast verify` checks every byte. To build it again: `plancast build "
        f"{manifest.name} --force`.",
    ]
    return "\n".join(lines) + "\n"


def _embedding(embedding: EmbeddingInfo) -> list[str]:
    lines = [
        f"It embeds: a text becomes {embedding.size} numbers (pooling: {embedding.pooling}"
        f"{', to length 1' if embedding.normalize else ''}), at `/v1/embeddings`.",
        "",
    ]
    if (parity := embedding.parity) is None:
        return [*lines, "This engine was not compared with the original model.", ""]
    return [
        *lines,
        "## Compared with the original model (Hugging Face transformers, f32)",
        "",
        f"- cosine of {parity.prompts} embeddings: {parity.mean_cosine:.6f} on average, "
        f"{parity.min_cosine:.6f} at least",
        f"- cosine of {parity.positions} tokens' hidden states: {parity.hidden_mean_cosine:.6f} on average, "
        f"{parity.hidden_min_cosine:.6f} at least",
        "",
    ]


def _parity(parity: Parity | None) -> list[str]:
    if parity is None:
        return ["This engine was not compared with the original model.", ""]
    return [
        "## Compared with the original model (Hugging Face transformers, f32)",
        "",
        f"- greedy: {parity.greedy_matching_prompts} of {parity.greedy_prompts} prompts continue identically "
        f"({parity.greedy_tokens} tokens in all)",
        f"- KL divergence: {parity.mean_kl:.2e} nats on average, {parity.p99_kl:.2e} at the 99th percentile, over "
        f"{parity.positions} positions",
        f"- same most likely token: {parity.top1_agreement:.2%}",
        f"- perplexity: {parity.perplexity:.6g} (the original: {parity.reference_perplexity:.6g})",
        "",
    ]
