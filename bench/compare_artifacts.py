"""`plancast bench compare`: artifacts side by side, in interleaved rounds of one run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.machine import describe_machine, machine_name
from bench.peers.peer import HERE
from bench.peers.rounds import measure, ratios, tables
from bench.peers.workers import Worker
from bench.prompts import prompts_of_length
from runtime.artifact import read_manifest
from runtime.errors import PlancastError


def compare_artifacts(
    artifacts: Sequence[Path],
    *,
    requests: Sequence[int] = (1, 16),
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    rounds: int = 5,
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The same greedy workload through each artifact's engine; each prompt is of the first one's tokenizer.

    Returns machine, settings and a row an engine and workload (see `bench.peers.rounds.Row`), with the ratios to the
    first artifact round by round. Raises `PlancastError` where one cannot be loaded, or takes no such prompts.
    """
    from builder.progress import make_progress
    from runtime.tokenizer import Tokenizer

    manifests = [read_manifest(artifact) for artifact in artifacts]
    for artifact, manifest in zip(artifacts, manifests, strict=True):
        limit = manifest.limits.max_context_len
        if prompt_tokens + output_tokens > limit:
            raise PlancastError(
                f"{artifact} takes {limit} tokens a request, {prompt_tokens} + {output_tokens} are asked for"
            )
    names = [str(artifact) for artifact in artifacts]
    tokenizer = Tokenizer.load(artifacts[0])
    threads = threads or len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="plancast-compare-") as logs,
        make_progress(quiet=quiet) as progress,
        ExitStack() as running,
    ):
        workers = []
        for number, (name, manifest) in enumerate(zip(names, manifests, strict=True)):
            config = {
                "artifact": str(Path(name).resolve()),
                "threads": threads,
                "max_num_seqs": max(requests),
                "max_num_batched_tokens": manifest.limits.max_num_batched_tokens,
            }
            with progress.stage(name):
                script = HERE / "worker_plancast.py"
                worker = Worker(name, Path(sys.executable), script, config, Path(logs) / f"{number}.log")
                workers.append(running.enter_context(worker))
        for count in requests:
            prompts = prompts_of_length(tokenizer.encode, [prompt_tokens] * count)
            with progress.stage(f"{count} x"):
                measured = measure(
                    workers,
                    prompts,
                    output_tokens,
                    rounds,
                    on_round=lambda done: progress.update("rounds", done, rounds),
                )
            for manifest, row in zip(manifests, measured, strict=True):
                first = measured[0]
                rows.append(
                    {
                        **row.report(),
                        "weights": manifest.recipe["weights"]["dtype"],
                        "kv": manifest.recipe["kv"]["key"],
                        "ratio_to_first": ratios(row.tokens_per_second, first.tokens_per_second),
                        "decode_ratio_to_first": ratios(row.decode_tokens_per_second, first.decode_tokens_per_second),
                    }
                )
    return {
        "machine": describe_machine(),
        "threads": threads,
        "rows": rows,
    }


def print_report(report: dict[str, Any]) -> None:
    """Medians, and the ratios to the first artifact with their spread."""
    from rich.console import Console

    console = Console()
    console.print(f"{machine_name(report['machine'])}, {report['threads']} threads; tokens/s, medians", markup=False)
    for table in tables(report["rows"], "of the first", "ratio_to_first", "decode_ratio_to_first"):
        console.print(table)
