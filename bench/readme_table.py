"""`python -m bench.readme_table [--check]`: every table of results in the documents, generated from `bench/results/`.

The README's comparison with peers takes the newest `*-peers-*.json` (`plancast bench peers --json`) of each model and
format of the weights. In `bench/results/README.md` stand the goals (`bench.goals`) and the files that tell by which
command they were made. What stands between the markers is rewritten.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.goals import goals_table
from bench.machine import machine_name
from bench.peers.rounds import spread
from bench.result_files import RESULTS, ROOT, Report, newest_peers

PEERS, GOALS, FILES = "peers", "goals", "files"


def rows(model: str, report: Report) -> list[str]:
    """Markdown rows of one report: a workload and engine each, plancast's own first."""
    lines = []
    for row in report["rows"]:
        ours = row["engine"] == "plancast"
        decode = row.get("decode_median")
        cells = (
            model if ours else "",
            str(row["requests"]),
            f"{row['engine']} {report['versions'][row['engine']]}",
            report["precision"][row["engine"]],
            f"{row['median']:.1f}",
            "" if ours else spread(row["ratio_of_plancast"]),
            "" if decode is None else f"{decode:.1f}",
            "" if ours else spread(row.get("decode_ratio_of_plancast", ())),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peers_table(results: Path) -> str:
    """The whole table, under sentences that name the machines, the threads and the dates.

    Raises ValueError: there are no results.
    """
    reports = newest_peers(results)
    if not reports:
        raise ValueError(f"no results of `plancast bench peers` (*-peers-*.json) in {results}")
    places: dict[str, list[str]] = {}
    for (model, weights), report in reports.items():
        row, machine = report["rows"][0], report["machine"]
        place = (
            f"{row['prompt_tokens']} tokens in and {row['output_tokens']} out, {report['threads']} threads of"
            f" {machine_name(machine)}, {machine['date']}"
        )
        places.setdefault(place, []).append(f"{model} {weights}")
    lines = ["Output tokens/s of the whole, and of decoding alone (requests / TPOT); medians of interleaved rounds of"]
    lines += ["one run. The columns beside them are plancast divided by that engine, round by round.", ""]
    lines += [f"- {', '.join(what)}: {place}" for place, what in places.items()]
    lines += [
        "",
        "| model | requests | engine | precision | tokens/s | plancast is (spread) | decode | plancast is (spread) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, _), report in reports.items():
        lines += rows(model, report)
    return "\n".join(lines)


def files_table(results: Path) -> str:
    """The files that tell by which command they were made, with their machines."""
    lines = ["| file | command | on |", "|---|---|---|"]
    for path in sorted(results.glob("*.json")):
        report = json.loads(path.read_text())
        if isinstance(report, dict) and "command" in report:
            machine = report["machine"]
            drawing = ", `.svg`" if path.with_suffix(".svg").exists() else ""
            on = f"{machine_name(machine)}, {machine['date']}"
            lines.append(f"| `{path.name}`{drawing} | `{report['command']}` | {on} |")
    return "\n".join(lines)


def between(text: str, marker: str, new: str) -> str:
    """The text with `new` between `<!-- MARKER: begin -->` and `<!-- MARKER: end -->`.

    Raises ValueError: the markers are missing.
    """
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document has no {begin} ... {end}")
    return f"{before}{begin}\n{new}\n{end}{after}"


def documents(results: Path = RESULTS) -> dict[Path, str]:
    """The documents that hold tables, as they must be."""
    readme, own = ROOT / "README.md", RESULTS / "README.md"
    return {
        readme: between(readme.read_text(), PEERS, peers_table(results)),
        own: between(between(own.read_text(), GOALS, goals_table(results)), FILES, files_table(results)),
    }


def main() -> None:
    for path, text in documents().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(f"a table of {path} is not that of bench/results/: run `python -m bench.readme_table`")


if __name__ == "__main__":
    main()
