"""The reference's half of `builder.parity`, a process of its own: `python -m builder.parity_reference QUESTIONS.json`.

Reads the questions and the engine's answers, asks the Hugging Face model in f32, and prints one line of JSON with the
fields of `runtime.manifest.Parity`, or of `EmbeddingParity` where the answers are embeddings.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 64  # positions compared at once, in f64: keeps a large vocabulary from filling the memory


def main(path: str) -> None:
    """Answer the questions in the JSON file `path`."""
    task = json.loads(Path(path).read_text())
    _end_with(task["parent"])
    import torch

    with torch.inference_mode():
        embeds = "embeddings" in task
        model = load_reference(task["folder"], trust_remote_code=task["trust_remote_code"], base=embeds)
        if embeds:
            figures = {**compare_embeddings(model, task), **compare_hidden(model, task)}
        else:
            figures = {**compare_greedy(model, task), **compare_text(model, task)}
    print(json.dumps(figures))


def load_reference(folder: str, *, trust_remote_code: bool, base: bool = False) -> Any:
    """The Hugging Face model of `folder` (`base`: without its head), in f32, from safetensors, with no network."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModel if base else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
    )
    return model.eval()


def compare_greedy(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """How far each answer is what the model itself would generate greedily.

    One pass over prompt and answer tells: the model's greedy answer is the engine's exactly if each of the engine's
    tokens is the model's favourite after the tokens before it.
    """
    matching = agreeing = tokens = 0
    for prompt, answer in zip(task["prompts"], task["answers"], strict=True):
        favourites = _logits(model, (prompt + answer)[:-1], keep=len(answer)).argmax(-1).tolist()
        agreed = next((i for i, pair in enumerate(zip(favourites, answer, strict=True)) if pair[0] != pair[1]), None)
        matching += agreed is None
        agreeing += len(answer) if agreed is None else agreed
        tokens += len(answer)
    return {
        "greedy_prompts": len(task["prompts"]),
        "greedy_tokens": tokens,
        "greedy_matching_prompts": matching,
        "greedy_matching_tokens": agreeing,
    }


def compare_text(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """KL(reference || engine) in nats, top-1 agreement, and both perplexities, over the text's windows."""
    import torch

    positions = sum(len(window) for window in task["windows"])
    engine = np.memmap(task["output"], np.float32, "r").reshape(positions, -1)
    divergences: list[float] = []
    agreed = 0
    engine_nll = reference_nll = 0.0
    scored = at = 0
    for window in task["windows"]:
        reference_rows = _logits(model, window, keep=len(window))
        targets = torch.tensor([*window[1:], 0])
        for start in range(0, len(window), _ROWS):
            rows = slice(start, min(start + _ROWS, len(window)))
            theirs = torch.log_softmax(reference_rows[rows].double(), -1)
            ours = torch.log_softmax(torch.from_numpy(np.array(engine[at + rows.start : at + rows.stop])).double(), -1)
            divergences += (theirs.exp() * (theirs - ours)).sum(-1).clamp(min=0).tolist()
            agreed += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
            # The window's last position has no token after it to be scored on.
            known = slice(0, min(rows.stop, len(window) - 1) - rows.start)
            target = targets[rows][known, None]
            engine_nll -= float(ours[known].gather(-1, target).sum())
            reference_nll -= float(theirs[known].gather(-1, target).sum())
            scored += target.shape[0]
        at += len(window)
    return {
        "positions": positions,
        "mean_kl": float(np.mean(divergences)),
        "p99_kl": float(np.quantile(divergences, 0.99)),
        "top1_agreement": agreed / positions,
        "perplexity": float(np.exp(engine_nll / max(1, scored))),
        "reference_perplexity": float(np.exp(reference_nll / max(1, scored))),
    }


def compare_embeddings(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Cosines between the engine's pooled vectors and the model's own."""
    cosines = []
    for prompt, ours in zip(task["prompts"], task["embeddings"], strict=True):
        hidden = _hidden(model, prompt)
        theirs = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[task["pooling"]]
        cosines += _cosines(np.array([ours]), theirs[None]).tolist()
    return {"prompts": len(cosines), "min_cosine": min(cosines), "mean_cosine": float(np.mean(cosines))}


def compare_hidden(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Cosines between the hidden states of each token of the text's windows."""
    positions = sum(len(window) for window in task["windows"])
    engine = np.memmap(task["output"], np.float32, "r").reshape(positions, -1)
    cosines: list[float] = []
    for window in task["windows"]:
        at = len(cosines)
        cosines += _cosines(engine[at : at + len(window)], _hidden(model, window)).tolist()
    return {
        "positions": positions,
        "hidden_min_cosine": min(cosines),
        "hidden_mean_cosine": float(np.mean(cosines)),
    }


def _hidden(model: Any, tokens: list[int]) -> Any:
    """The last hidden states f64 [T, H] of `tokens`."""
    import torch

    return model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].double().numpy()


def _cosines(ours: Any, theirs: Any) -> Any:
    """The cosine f64 [N] of each pair of rows [N, H]."""
    ours = ours.astype(np.float64)
    return (ours * theirs).sum(-1) / (np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)).clip(1e-300)


def _logits(model: Any, tokens: list[int], *, keep: int) -> Any:
    """The logits f32 [keep, V] after the last `keep` of `tokens`."""
    import torch

    return model(torch.tensor([tokens]), use_cache=False, logits_to_keep=keep).logits[0, -keep:]


def _end_with(parent: int) -> None:
    """Ask the system to end this process when the build that started it dies, however it dies (Linux)."""
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as failure:  # the build shows its last line of stderr to a person
        lines = str(failure).strip().splitlines() or [""]
        print(f"{type(failure).__name__}: {lines[0]}", file=sys.stderr)
        sys.exit(1)
