"""`plancast bench peers`: the same model, prompts, greedy settings and threads, in interleaved rounds of one run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import describe_machine, machine_name
from bench.peers.environments import PeerError, peers_folder
from bench.peers.peer import HERE, Peer, Setting
from bench.peers.peer_genai import OpenVinoGenAI, OpenVinoGenAIDefaults
from bench.peers.peer_llama import LlamaCpp
from bench.peers.peer_transformers import Transformers
from bench.peers.peer_vllm import VllmCpu
from bench.peers.rounds import measure, ratios, tables
from bench.peers.workers import Worker
from bench.prompts import prompts_of_length

if TYPE_CHECKING:
    from builder.progress import BuildProgress
    from builder.recipe import Recipe

_PEERS = (OpenVinoGenAI, OpenVinoGenAIDefaults, LlamaCpp, VllmCpu, Transformers)
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in _PEERS}
OURS = "plancast"


def compare(
    recipe_name: str,
    *,
    overrides: Sequence[str] = (),
    peers: Sequence[str] = (),
    requests: tuple[int, ...] = (1, 16),
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    rounds: int = 5,
    threads: int | None = None,
    setup_only: bool = False,
    quiet: bool = False,
    on_report: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any] | None:
    """Run the recipe's engine against peers, each at the nearest precision that it has.

    `overrides` change keys of the recipe as `plancast build --set` does. `peers` are names of `PEERS`; without any, all
    of them, and one that cannot be had here is left out with its reason. Shows what it is at on stderr unless `quiet`.
    Returns machine, settings, what was left out, and a row an engine and workload (see `bench.peers.rounds.Row`) with
    the ratios round by round (plancast / peer); None with `setup_only`, which installs, converts and builds all that
    a later run needs. `on_report` is given the same after each workload, as far as it is. Raises `PeerError` where a
    peer that was asked for cannot be installed or run.
    """
    from builder.build import build
    from builder.machine_choices import for_this_machine
    from builder.progress import make_progress
    from builder.recipe import load_recipe, recipe_hash
    from runtime.tokenizer import Tokenizer
    from zoo import resolve
    from zoo.store import slug

    for name in peers:
        if name not in PEERS:
            raise PeerError(f"no peer is called {name!r}; there are: {', '.join(PEERS)}")
    threads = threads or len(os.sched_getaffinity(0))
    recipe = for_this_machine(load_recipe(recipe_name, list(overrides)))
    # An engine of a changed recipe must not take the place of the one that the recipe's name stands for.
    own = Path("artifacts") / recipe.name
    out = peers_folder() / "artifacts" / f"{slug(recipe.name)}-{recipe_hash(recipe)[:12]}" if overrides else own
    artifact = build(recipe, out, progress=make_progress(quiet=quiet))
    tokenizer = Tokenizer.load(artifact)
    left_out: dict[str, str] = {}
    precision = {OURS: _precision(recipe)}
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="plancast-peers-") as logs,
        make_progress(quiet=quiet) as progress,
        ExitStack() as running,
    ):
        checkpoint = resolve(recipe.model, trust_remote_code=recipe.trust_remote_code)
        setting = Setting.of(
            recipe,
            checkpoint,
            threads=threads,
            max_num_seqs=max(requests),
            max_model_len=prompt_tokens + output_tokens + 8,
            logs=Path(logs),
        )
        config = {**setting.limits, "artifact": str(artifact.resolve())}
        if setup_only:
            for name in peers or PEERS:
                with progress.stage(name):
                    PEERS[name]().set_up(setting, progress)
            return None
        with progress.stage(OURS) as stage:
            ours = Worker(OURS, Path(sys.executable), HERE / "worker_plancast.py", config, Path(logs) / f"{OURS}.log")
            workers = [running.enter_context(ours)]
            stage.detail = f"{ours.version}, {precision[OURS]}"
        for name in peers or PEERS:
            peer = PEERS[name]()
            with progress.stage(name) as stage:
                worker = _start(peer, setting, progress, left_out, wanted=bool(peers))
                if worker is None:
                    stage.detail = f"left out: {left_out[name]}"
                    continue
                workers.append(running.enter_context(worker))
                precision[name] = peer.precision(recipe)
                stage.detail = f"{worker.version}, {precision[name]}"
        report: dict[str, Any] = {
            "machine": describe_machine(),
            "recipe": Path(recipe_name).stem,
            "overrides": list(overrides),
            "model": checkpoint.name,
            "weights": recipe.weights.dtype,
            "threads": threads,
            "precision": precision,
            "versions": {worker.name: worker.version for worker in workers},
            "left_out": left_out,
            "rows": rows,
        }
        for count in requests:
            prompts = prompts_of_length(tokenizer.encode, [prompt_tokens] * count)
            task = f"{count} requests" if count > 1 else "1 request"
            with progress.stage(task) as stage:
                measured = measure(
                    workers,
                    prompts,
                    output_tokens,
                    rounds,
                    on_round=lambda done: progress.update("rounds", done, rounds),
                )
                stage.detail = ", ".join(f"{row.engine} {row.report()['median']:.0f}" for row in measured) + " tokens/s"
            for row in measured:
                rows.append(
                    {
                        **row.report(),
                        "ratio_of_plancast": ratios(measured[0].tokens_per_second, row.tokens_per_second),
                        "decode_ratio_of_plancast": ratios(
                            measured[0].decode_tokens_per_second, row.decode_tokens_per_second
                        ),
                    }
                )
            on_report(report)
    return report


def _precision(recipe: Recipe) -> str:
    weights, activations = recipe.weights, recipe.backend.dynamic_quantization_group_size
    groups = f" in groups of {weights.group_size}" if isinstance(weights.group_size, int) else ""
    arithmetic = (
        f"int8 activations in groups of {activations}" if activations else f"{recipe.backend.compute} arithmetic"
    )
    return f"{weights.dtype} weights{groups}, {arithmetic}, {recipe.kv.key} KV"


def _start(
    peer: Peer, setting: Setting, progress: BuildProgress, left_out: dict[str, str], *, wanted: bool
) -> Worker | None:
    """The peer's worker; None, with the reason in `left_out`, where it cannot be had and was not asked for by name."""
    try:
        return peer.start(setting, progress)
    except PeerError as error:
        if wanted:
            raise
        left_out[peer.name] = str(error)
        return None


def print_report(report: dict[str, Any]) -> None:
    """A table for each number of requests: medians, and the ratios' medians with their spread over the rounds."""
    from rich.console import Console

    console, machine = Console(), report["machine"]
    console.print(
        f"{report['recipe']} on {machine_name(machine)}, {report['threads']} threads, {machine['date']}; tokens/s of"
        " the whole, of decoding alone and of prefill alone (medians), and how many times as fast plancast is",
        markup=False,
    )
    for table in tables(report["rows"], "plancast is", "ratio_of_plancast", "decode_ratio_of_plancast"):
        console.print(table)
    for name, version in report["versions"].items():
        console.print(f"{name} {version}: {report['precision'][name]}", markup=False, highlight=False)
    for name, reason in report["left_out"].items():
        console.print(f"left out {name}: {reason}", markup=False, highlight=False)
