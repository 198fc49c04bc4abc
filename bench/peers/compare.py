"""`plancast bench peers`: the same model, prompts, greedy settings and threads, in interleaved rounds of one run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.machine import describe_machine
from bench.peers.environments import OPENVINO_GENAI, PeerError
from bench.peers.workers import Worker
from bench.prompts import prompts_of_length

HERE = Path(__file__).resolve().parent

# What OpenVINO GenAI must be told so that its engine computes in the same formats as the recipe's.
GENAI_WEIGHTS = {"f32": "fp32", "bf16": "fp32", "int8": "int8"}
GENAI_TYPES = {"f32": "f32", "bf16": "bf16", "f16": "f16", "int8": "u8"}


@dataclass
class Row:
    """One workload, one engine: output tokens a second of each round, and the ratio to ours, round by round."""

    engine: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: list[float] = field(default_factory=list)
    ratio_of_plancast: list[float] = field(default_factory=list)  # plancast / this engine, per round

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def export_for_genai(checkpoint: Path, weights: str, folder: Path) -> Path:
    """The checkpoint folder as an OpenVINO GenAI model (optimum-cli, in the peer's environment). Cached by `folder`."""
    target = folder / f"{checkpoint.name}-{weights}"
    if (target / "openvino_model.bin").exists():
        return target
    command = [
        str(OPENVINO_GENAI.folder / "bin" / "optimum-cli"),
        *("export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"),
        *("--weight-format", weights, str(target)),
    ]
    print(f"exporting {checkpoint.name} for OpenVINO GenAI ({weights}) ...", file=sys.stderr)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise PeerError(f"optimum-cli cannot export {checkpoint}: {result.stderr.strip().splitlines()[-1:]}")
    return target


def compare(
    recipe_name: str,
    *,
    requests: tuple[int, ...] = (1, 16),
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    rounds: int = 5,
    threads: int | None = None,
) -> dict:
    """Run the recipe's engine against OpenVINO GenAI's ContinuousBatchingPipeline at the same precision.

    Returns machine, settings and a row an engine and workload: tokens/s per round and the ratio round by round
    (plancast / peer). Raises `PeerError` where the peer cannot be installed or run.
    """
    from builder.build import build
    from builder.recipe import load_recipe
    from runtime.tokenizer import Tokenizer
    from zoo import resolve

    threads = threads or os.cpu_count() or 1
    recipe = load_recipe(recipe_name)
    checkpoint = resolve(recipe.model)
    artifact = build(recipe, Path("artifacts") / recipe.name)
    python = OPENVINO_GENAI.ensure()
    model = export_for_genai(
        checkpoint.folder, GENAI_WEIGHTS[recipe.weights.dtype], OPENVINO_GENAI.folder.parent / "models"
    )
    common = {"threads": threads, "max_num_batched_tokens": recipe.limits.max_num_batched_tokens, "max_num_seqs": 64}
    properties = {
        "INFERENCE_PRECISION_HINT": GENAI_TYPES[recipe.backend.compute],
        "KV_CACHE_PRECISION": GENAI_TYPES[recipe.kv.key],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": recipe.backend.dynamic_quantization_group_size,
    }
    tokenizer = Tokenizer.load(artifact)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        Worker(
            "plancast",
            Path(sys.executable),
            HERE / "worker_plancast.py",
            {**common, "artifact": str(artifact.resolve())},
            Path(logs) / "plancast.log",
        ) as ours,
        Worker(
            "openvino-genai",
            python,
            HERE / "worker_genai.py",
            {**common, "model": str(model), "properties": properties},
            Path(logs) / "genai.log",
        ) as peer,
    ):
        versions = {ours.name: ours.version, peer.name: peer.version}
        for count in requests:
            prompts = prompts_of_length(tokenizer.encode, [prompt_tokens] * count)
            measured = {worker.name: Row(worker.name, count, prompt_tokens, output_tokens) for worker in (ours, peer)}
            for worker in (ours, peer):
                worker.run(prompts, 8)  # warm-up
            for turn in range(rounds):
                for worker in (ours, peer) if turn % 2 == 0 else (peer, ours):
                    seconds, outputs = worker.run(prompts, output_tokens)
                    produced = sum(map(len, outputs))
                    if produced != count * output_tokens:
                        raise PeerError(f"{worker.name} produced {produced} tokens, not {count * output_tokens}")
                    measured[worker.name].tokens_per_second.append(produced / seconds)
            mine = measured["plancast"].tokens_per_second
            for row in measured.values():
                row.ratio_of_plancast = [a / b for a, b in zip(mine, row.tokens_per_second, strict=True)]
                rows.append(row)
    return {
        "machine": describe_machine(),
        "recipe": recipe_name,
        "threads": threads,
        "precision": {"weights": recipe.weights.dtype, "compute": recipe.backend.compute, "kv": recipe.kv.key},
        "versions": versions,
        "rows": [{**asdict(row), "median": row.median} for row in rows],
    }


def print_report(report: dict) -> None:
    """The comparison as a table: medians, and the ratio's median with its spread over the rounds."""
    from rich.console import Console
    from rich.table import Table

    machine = report["machine"]
    table = Table(title=f"{report['recipe']} on {machine['processor']}, {report['threads']} threads, {machine['date']}")
    for title in ("requests", "engine", "output tokens/s", "plancast is"):
        table.add_column(title, justify="right" if title != "engine" else "left")
    for row in report["rows"]:
        ratios = row["ratio_of_plancast"]
        spread = f"{statistics.median(ratios):.2f} x ({min(ratios):.2f}-{max(ratios):.2f})"
        table.add_row(
            str(row["requests"]),
            f"{row['engine']} {report['versions'][row['engine']]}",
            f"{row['median']:.1f}",
            "" if row["engine"] == "plancast" else spread,
        )
    Console().print(table)
