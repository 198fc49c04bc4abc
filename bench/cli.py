"""`plancast bench ...`: measurements, each on this machine, each with a table and `--json`."""

from __future__ import annotations

from pathlib import Path

import typer

JSON_OPTION = typer.Option(None, "--json", metavar="FILE", help="Also write the figures here.")


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure: scheduler, batching, peers side by side.", no_args_is_help=True)

    @bench.command("peers")
    def peers(
        recipe: str = typer.Argument("smollm2-135m-cpu", help="The recipe to measure."),
        requests: list[int] = typer.Option([1, 16], help="Concurrent requests; repeat for several."),
        prompt_tokens: int = typer.Option(128, min=1),
        output_tokens: int = typer.Option(128, min=1),
        rounds: int = typer.Option(5, min=1, help="Interleaved rounds."),
        threads: int | None = typer.Option(None, min=1, help="Threads of each engine; the machine's cores by default."),
        json_file: Path | None = JSON_OPTION,
    ) -> None:
        """Compare with OpenVINO GenAI's ContinuousBatchingPipeline at the same precision, in one interleaved run."""
        from bench.peers.compare import compare, print_report, write_json

        report = compare(
            recipe,
            requests=tuple(requests),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            threads=threads,
        )
        print_report(report)
        if json_file is not None:
            write_json(report, json_file)

    app.add_typer(bench, name="bench")
