"""The commands `bench serve`, `bench throughput` and `bench latency`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from runtime.errors import PlancastError

_LOAD, _WORK, _OUT = "Arrivals", "Workload", "Report"

Artifact = Annotated[Path, typer.Argument(help="An artifact's folder.")]
Dataset = Annotated[
    Literal["synthetic", "sharegpt", "shared-prefix", "trace"],
    typer.Option(help="What is asked.", rich_help_panel=_WORK),
]
DatasetFile = Annotated[
    Path | None,
    typer.Option(
        "--dataset-path",
        metavar="FILE",
        help="ShareGPT's JSON, or a trace: JSON lines (timestamp in ms, input_length, output_length), or Azure's CSV.",
        rich_help_panel=_WORK,
    ),
]
Prompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Requests of a run.", rich_help_panel=_WORK)]
InputTokens = Annotated[int, typer.Option(min=1, help="Of a prompt of its own.", rich_help_panel=_WORK)]
OutputTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Of an answer. Default: 128; as in the file (sharegpt).", rich_help_panel=_WORK),
]
Spread = Annotated[
    float,
    typer.Option(min=0, max=1, help="Lengths vary evenly by so much, up and down (synthetic).", rich_help_panel=_WORK),
]
PrefixTokens = Annotated[int, typer.Option(min=1, help="Of the shared prefix.", rich_help_panel=_WORK)]
Prefixes = Annotated[int, typer.Option(min=1, help="Different shared prefixes.", rich_help_panel=_WORK)]
Seed = Annotated[int, typer.Option(help="Of lengths, order, arrivals and sampling.", rich_help_panel=_WORK)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the report here.", rich_help_panel=_OUT)
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a report with plots here.", rich_help_panel=_OUT),
]


def serve(
    target: Annotated[str, typer.Argument(help="A server's URL, or an artifact, which is then served meanwhile.")],
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time; repeat for several runs. Default: 16.", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=1e-3, help="Poisson arrivals a second; repeat for several runs.", rich_help_panel=_LOAD),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Bound on requests at a time, with --rate.", rich_help_panel=_LOAD)
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Below 1: arrivals in bursts; above: evener.", rich_help_panel=_LOAD)
    ] = 1.0,
    trace_speed: Annotated[
        float, typer.Option(min=1e-3, help="Play the trace so many times as fast.", rich_help_panel=_LOAD)
    ] = 1.0,
    dataset: Dataset = "synthetic",
    dataset_path: DatasetFile = None,
    num_prompts: Prompts = 100,
    input_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Of a prompt of its own; repeat for several runs. Default: 128.", rich_help_panel=_WORK
        ),
    ] = None,
    output_tokens: OutputTokens = None,
    length_spread: Spread = 0.0,
    prefix_tokens: PrefixTokens = 256,
    num_prefixes: Prefixes = 4,
    seed: Seed = 0,
    model: Annotated[str | None, typer.Option(help="Its name there. Default: the server's first.")] = None,
    api: Annotated[Literal["completions", "chat"], typer.Option(help="OpenAI's completions or chats.")] = "completions",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A folder with tokenizer.json, for exact lengths at a URL; else about 4 characters each."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="PLANCAST_API_KEY", help="Of the server.")] = None,
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="More fields for each request.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of just the length asked for.")] = True,
    warmup: Annotated[int, typer.Option(min=1, help="Requests before the first run.")] = 2,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limit in ms, such as ttft:200, tpot:50 or e2el:3000; repeat for several."),
    ] = None,
    serve_argument: Annotated[
        list[str] | None,
        typer.Option(help="For the server that is started here, such as --serve-argument=--max-num-seqs=32."),
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Latency and throughput of a server under load, with vLLM's metrics; against any OpenAI-compatible URL."""
    from bench.report import write_json
    from bench.serving.metrics import parse_goodput
    from bench.serving.report import html_report, print_runs
    from bench.serving.serve import Load, bench_serve, tokenizer_of
    from bench.serving.workload import Workload

    limits = parse_goodput(goodput or ())
    extra = _object(extra_body)
    if dataset == "trace" and (concurrency or rate):
        raise PlancastError("a trace brings its own times: leave --concurrency and --rate out")
    if concurrency and rate:
        raise PlancastError("give --concurrency or --rate, not both; --max-concurrency bounds a rate")
    arrivals: list[dict[str, Any]]
    if dataset == "trace":
        arrivals = [{"concurrency": max_concurrency}]
    elif rate:
        arrivals = [{"concurrency": max_concurrency, "rate": each, "burstiness": burstiness} for each in rate]
    else:
        arrivals = [{"concurrency": each} for each in concurrency or [16]]
    lengths = input_tokens or [128]
    loads = [
        Load(
            Workload(
                dataset, dataset_path, num_prompts, length, output_tokens, length_spread, prefix_tokens, num_prefixes,
                trace_speed, seed,
            ),
            swept=len(lengths) > 1,
            **each,
        )
        for length in lengths
        for each in arrivals
    ]  # fmt: skip
    folder = Path(target) if tokenizer is None and Path(target).is_dir() else tokenizer
    # A chat takes texts alone; the server counts their tokens.
    encode = tokenizer_of(folder) if api == "completions" else None
    with _bar() as (begin, advance):
        report = bench_serve(
            target,
            loads,
            encode,
            model=model,
            api=api,
            api_key=api_key,
            extra=extra,
            ignore_eos=ignore_eos,
            goodput=limits,
            warmup=warmup,
            seed=seed,
            serve_arguments=serve_argument or (),
            on_run=begin,
            on_reply=lambda reply: advance(reply.output_tokens),
        )
    report["workload"] = "; ".join(dict.fromkeys(load.workload.described for load in loads))
    print_runs(report)
    write_json(report, json_file)
    _write(html_file, lambda: html_report(report))
    if any(run["failed"] for run in report["runs"]):
        raise typer.Exit(1)


def throughput(
    artifact: Artifact,
    dataset: Dataset = "synthetic",
    dataset_path: DatasetFile = None,
    num_prompts: Prompts = 100,
    input_tokens: InputTokens = 128,
    output_tokens: OutputTokens = None,
    length_spread: Spread = 0.0,
    prefix_tokens: PrefixTokens = 256,
    num_prefixes: Prefixes = 4,
    seed: Seed = 0,
    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None,
    num_threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """All requests at once through the engine in this process: requests and tokens a second."""
    from bench.serving.offline import bench_throughput
    from bench.serving.serve import tokenizer_of
    from bench.serving.workload import Workload

    encode = tokenizer_of(artifact)
    workload = Workload(
        dataset, dataset_path, num_prompts, input_tokens, output_tokens, length_spread, prefix_tokens, num_prefixes,
        seed=seed,
    )  # fmt: skip
    asks = workload.asks(encode, 0)
    options = _set(max_num_seqs=max_num_seqs, num_threads=num_threads)
    with _bar() as (begin, advance):
        begin("requests", len(asks))
        report = bench_throughput(
            artifact, asks, warmup=workload.asks(encode, -1)[:1], engine_options=options, on_done=advance
        )
    report["workload"] = workload.described
    _finish_offline(report, json_file, html_file)


def latency(
    artifact: Artifact,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of one batch.")] = 8,
    input_tokens: InputTokens = 32,
    output_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_WORK)] = 128,
    iterations: Annotated[int, typer.Option(min=1, help="Batches that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Batches before them.")] = 2,
    seed: Seed = 0,
    num_threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """How long one batch takes from its start to its last token."""
    from bench.serving.offline import bench_latency
    from bench.serving.serve import tokenizer_of
    from bench.serving.workload import synthetic

    encode = tokenizer_of(artifact)
    count = batch_size * (iterations + warmup)
    asks = synthetic(encode, count, input_tokens, output_tokens, 0.0, seed)
    batches = [asks[at : at + batch_size] for at in range(0, count, batch_size)]
    with _bar() as (begin, advance):
        begin("batches", len(batches))
        report = bench_latency(
            artifact, batches, warmup=warmup, engine_options=_set(num_threads=num_threads), on_done=advance
        )
    report["workload"] = f"batches of {batch_size}, {input_tokens} tokens in, {output_tokens} out"
    _finish_offline(report, json_file, html_file)


def _object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PlancastError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PlancastError(f"--extra-body must be a JSON object, not {text}")
    return value


def _set(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def _bar() -> Iterator[tuple[Callable[[str, int], None], Callable[[int], None]]]:
    """A progress bar on stderr: what begins a run (label, requests), and what counts a request (its tokens)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[tokens]:,} tokens"), console=Console(stderr=True)) as progress:
        tasks: list[Any] = []

        def begin(label: str, total: int) -> None:
            tasks.append(progress.add_task(label, total=total, tokens=0))

        def advance(tokens: int) -> None:
            task = progress.tasks[tasks[-1]]
            progress.update(tasks[-1], advance=1, tokens=task.fields["tokens"] + tokens)

        yield begin, advance


def _finish_offline(report: dict[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    from bench.report import write_json
    from bench.serving.report import html_offline, print_figures

    print_figures(report)
    write_json(report, json_file)
    _write(html_file, lambda: html_offline(report))


def _write(path: Path | None, render: Callable[[], str]) -> None:
    if path is not None:
        path.write_text(render(), encoding="utf-8")
