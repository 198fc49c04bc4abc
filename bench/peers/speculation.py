"""Speculation against peers' own: the same prompts, one request at a time, greedy, in interleaved rounds of one run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.machine import describe_machine
from bench.peers.environments import PeerError
from bench.peers.peer import HERE, Peer, Setting
from bench.peers.peer_genai import OpenVinoGenAI
from bench.peers.peer_llama import LlamaCpp
from bench.peers.rounds import measure, ratios, tables
from bench.peers.workers import Worker
from bench.speculation_bench import default_methods, load_prompts

if TYPE_CHECKING:
    from zoo.progress import Progress

# Lookups by at least so many tokens, as `prompt_lookup_min` of ours, and drafts of at most so many. Longer keys and
# drafts, llama.cpp's defaults, draft next to never on texts as short as these.
_LOOKUP, _DRAFT = 3, 8


class GenAILookup(OpenVinoGenAI):
    """OpenVINO GenAI's prompt lookup."""

    name = "openvino-genai lookup"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        return {**super().prepare(setting, progress), "prompt_lookup": {"tokens": _DRAFT, "ngram": _LOOKUP}}


class LlamaLookup(LlamaCpp):
    """llama.cpp's n-gram lookup in the request's own text (`ngram-simple`)."""

    name = "llama.cpp lookup"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        arguments = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(_LOOKUP)]
        arguments += ["--spec-ngram-simple-size-m", str(_DRAFT), "--spec-draft-n-max", str(_DRAFT)]
        return {**super().prepare(setting, progress), "arguments": arguments}


PEERS: tuple[type[Peer], ...] = (OpenVinoGenAI, GenAILookup, LlamaCpp, LlamaLookup)


def compare_speculation(
    artifact: Path,
    *,
    workloads: Sequence[str] = (),
    output_tokens: int = 96,
    rounds: int = 3,
    threads: int,
    quiet: bool,
    on_report: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The prompts of each workload through the artifact, plain and with each of its own proposers, and through peers.

    All answers have `output_tokens` tokens. Peers that cannot be had are left out, with the reason. Returns machine,
    what was left out, and a row an engine and workload, with ratios round by round (the first proposer of ours / it);
    `on_report` is given the same after each workload, as far as it is.
    """
    from builder.progress import make_progress
    from builder.recipe import recipe_from_dict
    from runtime.artifact import Artifact
    from runtime.chat_template import ChatTemplate
    from runtime.tokenizer import Tokenizer
    from zoo import resolve

    manifest = Artifact.open(artifact).manifest
    recipe, tokenizer = recipe_from_dict(manifest.recipe), Tokenizer.load(artifact)
    template = ChatTemplate.load(artifact, tokenizer)
    assert template is not None, "the workloads are chats"
    texts = {name: prompts for name, prompts in load_prompts().items() if not workloads or name in workloads}
    chats = {
        name: [
            tokenizer.encode(template.render([{"role": "user", "content": text}]), add_special_tokens=False)
            for text in prompts
        ]
        for name, prompts in texts.items()
    }
    left_out: dict[str, str] = {}
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
            max_num_seqs=1,
            max_model_len=max(len(ids) for prompts in chats.values() for ids in prompts) + output_tokens + 8,
            logs=Path(logs),
        )
        workers: list[Worker] = []
        for method in (*default_methods(artifact), "off"):
            name = "plancast" if method == "off" else f"plancast {method}"
            config = {**setting.limits, "artifact": str(artifact.resolve()), "speculative_config": method}
            worker = Worker(
                name, Path(sys.executable), HERE / "worker_plancast.py", config, Path(logs) / f"{method}.log"
            )
            workers.append(running.enter_context(worker))
        for peer in PEERS:
            with progress.stage(peer.name) as stage:
                try:
                    workers.append(running.enter_context(peer().start(setting, progress)))
                except PeerError as error:
                    left_out[peer.name] = stage.detail = str(error)
        report: dict[str, Any] = {
            "machine": describe_machine(),
            "artifact": manifest.name,
            "threads": threads,
            "versions": {worker.name: worker.version for worker in workers},
            "left_out": left_out,
            "rows": rows,
        }
        for workload, prompts in chats.items():
            with progress.stage(workload) as stage:
                measured = measure(workers, prompts, output_tokens, rounds)
                stage.detail = ", ".join(f"{row.engine} {row.report()['median']:.0f}" for row in measured) + " tokens/s"
            for row in measured:
                rows.append(
                    {
                        **row.report(),
                        "workload": workload,
                        "ratio": ratios(measured[0].tokens_per_second, row.tokens_per_second),
                        "decode_ratio": ratios(measured[0].decode_tokens_per_second, row.decode_tokens_per_second),
                    }
                )
            on_report(report)
    return report


def print_report(report: dict[str, Any]) -> None:
    """A table a workload."""
    from rich.console import Console

    console = Console()
    for workload in dict.fromkeys(row["workload"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["workload"] == workload]
        console.print(f"{workload}, one request at a time", markup=False)
        for table in tables(rows, f"{rows[0]['engine']} is", "ratio", "decode_ratio"):
            console.print(table)
    for name, reason in report["left_out"].items():
        console.print(f"left out {name}: {reason}", markup=False, highlight=False)
