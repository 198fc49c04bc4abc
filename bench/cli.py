"""`plancast bench ...`: measurements, each on this machine, each with a table and `--json`."""

from __future__ import annotations

from pathlib import Path

import typer

JSON_OPTION = typer.Option(None, "--json", metavar="FILE", help="Also write the figures here.")


def register(app: typer.Typer) -> None:
    bench = typer.Typer(
        help="Measure: scheduler, sampler, batching, streams, peers side by side.", no_args_is_help=True
    )
    for command in (runtime, batching, sampler, peers):
        bench.command(command.__name__)(command)
    app.add_typer(bench, name="bench")


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
    plot: Path | None = typer.Option(None, metavar="FILE.svg", help="Draw both modes."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """In-flight batching against static batching, on the same workload."""
    from bench.batching_bench import bench_batching, draw, print_report
    from bench.report import status, write_json

    with status() as progress:
        report = bench_batching(
            artifact, num_requests=requests, max_num_seqs=max_num_seqs, rate=rate, progress=progress
        )
    print_report(report)
    if plot is not None:
        plot.write_text(draw(report))
    write_json(report, json_file)


def sampler(json_file: Path | None = JSON_OPTION) -> None:
    """Sampling 64 rows of a 49,152-token vocabulary on one core, by kind of request."""
    from bench.machine import describe_machine
    from bench.report import write_json
    from bench.sampler_bench import bench_sampler

    figures = bench_sampler(progress=lambda kind, ms: print(f"{kind:45s} {ms:7.3f} ms"))
    write_json({"machine": describe_machine(), "milliseconds": figures}, json_file)


def peers(
    recipe: str = typer.Argument("smollm2-135m-cpu", help="The recipe to measure."),
    requests: list[int] = typer.Option([1, 16], min=1, help="Concurrent requests; repeat for several."),
    prompt_tokens: int = typer.Option(128, min=1),
    output_tokens: int = typer.Option(128, min=1),
    rounds: int = typer.Option(5, min=1, help="Interleaved rounds."),
    threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
    json_file: Path | None = JSON_OPTION,
) -> None:
    """Compare with OpenVINO GenAI's ContinuousBatchingPipeline at the same precision, in one interleaved run."""
    from bench.peers.compare import compare, print_report
    from bench.report import write_json

    report = compare(
        recipe,
        requests=tuple(requests),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        threads=threads,
    )
    print_report(report)
    write_json(report, json_file)
