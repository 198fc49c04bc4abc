"""A short soak: hundreds of mixed requests, kills among them, and nothing is left over (long: `bench/soak.py`)."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tiny_served import write_served_artifact

from bench.soak import soak


@pytest.mark.parametrize("kill_every", [0, 60])
def test_a_short_soak_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_every: int) -> None:
    monkeypatch.setenv("PLANCAST_EXECUTOR_FACTORY", "tiny_served:open_hash")
    artifact = write_served_artifact(tmp_path / "tiny")
    threads = threading.active_count()

    async def run():
        return await soak(artifact, requests=240, max_tokens=12, kill_every=kill_every, num_samples=10, show=False)

    report = asyncio.run(run())
    assert report.requests == 240
    assert report.left_early > 5
    assert report.restarts == (240 // kill_every if kill_every else 0)
    assert len({sample.client_threads for sample in report.samples}) == 1
    assert max(sample.client_files for sample in report.samples) <= report.samples[0].client_files + 1
    assert threading.active_count() <= threads
    assert not [name for name in os.listdir(tmp_path) if name != "tiny"]
