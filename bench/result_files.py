"""`bench/results/`: what has been measured, newest first of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
Report = dict[str, Any]


def newest(folder: Path, kind: str) -> list[Report]:
    """Every report `*-KIND*.json` there, the newest first; of equal age in the order of their names.

    Raises ValueError: a file is no JSON object.
    """
    reports = []
    for path in sorted(folder.glob(f"*-{kind}*.json")):
        report = json.loads(path.read_text())
        if not isinstance(report, dict):
            raise ValueError(f"{path} is no report: a JSON object is expected")
        reports.append(report)
    return sorted(reports, key=measured_at, reverse=True)


def measured_at(report: Report) -> str:
    """The time, or where the report does not tell, the date: ISO 8601, so that texts compare as times do."""
    return report["machine"].get("time") or report["machine"]["date"]


def newest_peers(folder: Path) -> dict[tuple[str, str], Report]:
    """By (model, format of the weights): the newest comparison with peers, in the order of the names."""
    reports: dict[tuple[str, str], Report] = {}
    for report in newest(folder, "peers"):
        weights = report.get("weights") or report["precision"]["plancast"].split()[0]
        reports.setdefault((report.get("model", "smollm2-135m-instruct"), weights), report)
    return dict(sorted(reports.items()))
