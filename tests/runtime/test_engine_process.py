"""The engine in a process of its own: starting, answering, dying, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from engine_clients import GREEDY, Recorder, request
from tiny_model import HashModelExecutor

from runtime.client.process_engine import ProcessEngine
from runtime.config import EngineConfig
from runtime.engine_client import EngineClient, InProcessEngine
from runtime.engine_process import EngineSpec
from runtime.errors import ArtifactError, EngineDeadError, PlancastError, RequestError
from runtime.messages import AbortRequests, EngineStats
from runtime.sampling_params import SamplingParams

CONFIG = EngineConfig(max_context_len=256, max_num_seqs=32, max_num_batched_tokens=64, num_blocks=600)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=32, ignore_eos=True)
CLIENTS = [ProcessEngine, InProcessEngine]


def spec(factory: str = "open_hash", config: EngineConfig = CONFIG, **factory_args) -> EngineSpec:
    return EngineSpec(config=config, factory=f"tiny_served:{factory}", factory_args=factory_args)


def expected(prompt: list[int], length: int = 32) -> list[int]:
    """The hash model's greedy answer, from the history alone."""
    model, history = HashModelExecutor(512), list(prompt)
    for _ in range(length):
        history.append(int(model.logits_after(history).argmax()))
    return history[len(prompt) :]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(spec(step_s=0.002), recorder)
    yield engine
    engine.close()


def submit(engine: EngineClient, recorder: Recorder, *requests) -> None:
    for message in requests:
        engine.add_request(recorder.add(message))


@pytest.mark.parametrize("client", CLIENTS)
def test_greedy_answers_are_the_models_own(client: type[EngineClient], recorder: Recorder) -> None:
    engine = client(spec(), recorder)  # type: ignore[call-arg]
    try:
        prompts = {f"r{i}": [i, 3, 5, 7 * i] for i in range(8)}
        submit(engine, recorder, *(request(name, prompt) for name, prompt in prompts.items()))
        recorder.wait(*prompts)
        for name, prompt in prompts.items():
            assert recorder.tokens[name][0] == expected(prompt)
            assert recorder.finished[name].sequences[0].finish_reason == "length"
        stats = engine.call("stats", with_blocks=True).result(10)
        assert isinstance(stats, EngineStats)
        assert stats.requests_finished == 8
        assert stats.generation_tokens == 8 * 32
        assert len(stats.block_states) == stats.num_blocks == 600
        assert engine.call("ping").result(10) == "pong"
        assert engine.call("reset_prefix_cache").result(10) >= 0
        with pytest.raises(PlancastError, match="no call 'dance'"):
            engine.call("dance").result(10)
    finally:
        engine.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_abort_frees_the_blocks_and_ends_the_answers(client: type[EngineClient], recorder: Recorder) -> None:
    engine = client(spec(step_s=0.005), recorder)  # type: ignore[call-arg]
    try:
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        submit(engine, recorder, request("gone", [1, 2, 3], long), request("stays", [4, 5, 6]))
        recorder.wait_for_tokens(6)
        engine.abort(AbortRequests(["gone", "never was"]))
        recorder.wait("stays")
        stats = engine.call("stats").result(10)
        assert stats.num_running == 0
        assert stats.num_free_blocks == stats.num_blocks
        assert "gone" not in recorder.finished
        assert len(recorder.tokens["gone"][0]) < 200
    finally:
        engine.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_the_error_of_loading_comes_back_word_for_word(client: type[EngineClient], recorder: Recorder) -> None:
    with pytest.raises(ArtifactError, match=r"^the engine is made of cheese$"):
        client(spec("open_broken", error="the engine is made of cheese"), recorder)  # type: ignore[call-arg]
    with pytest.raises(PlancastError, match=r"no executor factory 'tiny_served:open_nothing'"):
        client(spec("open_nothing"), recorder)  # type: ignore[call-arg]


def test_another_error_of_loading_says_what_happened(recorder: Recorder) -> None:
    with pytest.raises(EngineDeadError, match="failed while loading: ValueError: oops"):
        ProcessEngine(spec("open_broken", error="oops", plain=True), recorder)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_refused_request_is_answered_and_the_engine_lives(client: type[EngineClient], recorder: Recorder) -> None:
    engine = client(spec(), recorder)  # type: ignore[call-arg]
    try:
        submit(engine, recorder, request("too long", [1] * 300), request("fine", [1, 2]))
        recorder.wait("too long", "fine")
        assert recorder.finished["too long"].error_kind == "request"
        assert "300" in (recorder.finished["too long"].error or "")
        assert recorder.tokens["fine"][0] == expected([1, 2])
    finally:
        engine.close()


def test_a_request_of_wrong_types_ends_alone(engine: ProcessEngine, recorder: Recorder) -> None:
    submit(engine, recorder, request("hot", [1, 2], SamplingParams(temperature="hot")), request("fine", [1, 2]))  # type: ignore[arg-type]
    recorder.wait("hot", "fine")
    assert recorder.finished["hot"].error_kind == "request"
    assert "cannot be read" in (recorder.finished["hot"].error or "")
    with pytest.raises(RequestError, match="cannot be sent"):
        engine.add_request(request("odd", [1, 1 << 80]))
    with pytest.raises(RequestError, match="cannot be sent"):
        engine.add_request(request("odder", [object()]))  # type: ignore[list-item]


def test_a_killed_engine_is_replaced_and_32_streams_go_on(recorder: Recorder) -> None:
    """Greedy and seeded, n = 1 and n = 2: the same tokens as undisturbed, and none twice."""
    seeded_pair = SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=32, ignore_eos=True)
    params = [GREEDY, SEEDED, GREEDY, seeded_pair]
    requests = [request(f"r{i}", [i, 2 * i, 17], params[i % 4]) for i in range(32)]

    calm = Recorder()
    undisturbed = InProcessEngine(spec(), calm)
    submit(undisturbed, calm, *requests)
    calm.wait(*calm.requests)
    undisturbed.close()

    engine = ProcessEngine(spec(step_s=0.004), recorder)
    try:
        first_pid = engine.ready.pid
        submit(engine, recorder, *requests)
        recorder.wait_for_tokens(32 * 8)
        os.kill(engine.ready.pid, signal.SIGKILL)
        seen = recorder.num_delivered
        recorder.wait_for_tokens(seen + 32 * 8)
        assert engine.ready.pid != first_pid
        os.kill(engine.ready.pid, signal.SIGKILL)
        recorder.wait(*recorder.requests)
        assert recorder.tokens == calm.tokens
        assert engine.num_restarts == 2
        stats = engine.call("stats").result(10)
        assert stats.generation_tokens >= 32 * 8, "counters outlive the core"
        assert stats.num_running == 0
        assert stats.num_free_blocks == stats.num_blocks == 600
    finally:
        engine.close()


def test_requests_and_calls_made_while_the_engine_is_down_wait_for_the_next(
    engine: ProcessEngine, recorder: Recorder
) -> None:
    os.kill(engine.ready.pid, signal.SIGKILL)
    submit(engine, recorder, request("a", [1, 2, 3]), request("b", [4]), request("dropped", [5]))
    engine.abort(AbortRequests(["dropped"]))
    assert engine.call("ping").result(30) == "pong"
    recorder.wait("a", "b")
    assert recorder.tokens["a"][0] == expected([1, 2, 3])
    assert "dropped" not in recorder.tokens


def test_each_process_writes_an_iteration_log_of_its_own(recorder: Recorder, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, iteration_log=str(tmp_path / "steps.jsonl"))
    engine = ProcessEngine(spec(config=config, step_s=0.005), recorder)
    try:
        submit(engine, recorder, request("a", [1, 2]))
        recorder.wait_for_tokens(4)
        os.kill(engine.ready.pid, signal.SIGKILL)
        recorder.wait("a")
    finally:
        engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.jsonl", "steps.restart-1.jsonl"]


def test_too_many_deaths_end_every_request_with_the_reason(recorder: Recorder) -> None:
    engine = ProcessEngine(spec(step_s=0.01), recorder, max_restarts=1)
    try:
        long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        submit(engine, recorder, request("a", [1], long), request("b", [2], long))
        for _ in range(2):
            seen = recorder.num_delivered
            recorder.wait_for_tokens(seen + 12)
            os.kill(engine.ready.pid, signal.SIGKILL)
        recorder.wait("a", "b")
        assert recorder.finished["a"].error_kind == "engine"
        assert "died 2 times within 300 s" in (recorder.finished["b"].error or "")
        assert "signal 9" in (recorder.finished["b"].error or "")
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="died 2 times"):
            engine.add_request(request("c", [3]))
        with pytest.raises(EngineDeadError, match="died 2 times"):
            engine.call("stats").result(5)
    finally:
        engine.close()


def test_an_engine_killed_while_loading_is_an_error_at_once(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"signal 9 .* on loading"):
        ProcessEngine(spec("open_once", marker=str(tmp_path / "marker"), times=0), recorder)


def test_an_engine_that_never_comes_up_again_ends_every_request(recorder: Recorder, tmp_path: Path) -> None:
    engine = ProcessEngine(spec("open_once", marker=str(tmp_path / "marker")), recorder, max_restarts=2)
    try:
        submit(engine, recorder, request("a", [1]), request("b", [2]))
        recorder.wait_for_tokens(4)
        os.kill(engine.ready.pid, signal.SIGKILL)
        recorder.wait("a", "b")
        assert "died 3 times" in (recorder.finished["a"].error or "")
        assert not engine.is_alive
    finally:
        engine.close()


def test_a_fork_of_the_client_leaves_the_engine_alone(engine: ProcessEngine) -> None:
    child = os.fork()
    if child == 0:
        engine.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert engine.call("ping").result(10) == "pong"
    assert engine.num_restarts == 0


def test_a_poisoned_request_is_refused_alone(recorder: Recorder) -> None:
    """Requests whose answers come upon a deadly token (case: a crash in mid-stream) and one whose prompt holds it."""
    deadly = 349
    prompts = {f"r{i}": [i, 3, 0] for i in range(32)}
    doomed = {name for name, prompt in prompts.items() if deadly in expected(prompt)[:-1]}
    assert len(doomed) == 1
    prompts["poison"] = [9, deadly, 9]
    doomed.add("poison")
    engine = ProcessEngine(spec("open_poisoned", deadly_tokens=[deadly], step_s=0.001), recorder)
    try:
        submit(engine, recorder, *(request(name, prompt) for name, prompt in prompts.items()))
        recorder.wait(*prompts, timeout=120)
        for name, prompt in prompts.items():
            if name in doomed:
                assert recorder.finished[name].error_kind == "request"
                assert "crashes the engine" in (recorder.finished[name].error or "")
                answer = expected(prompt) if name != "poison" else []
                assert recorder.tokens[name][0] == answer[: len(recorder.tokens[name][0])]
            else:
                assert recorder.tokens[name][0] == expected(prompt), name
        assert engine.is_alive
        restarts = engine.num_restarts
        with pytest.raises(RequestError, match="crashed the engine"):
            engine.add_request(request("poison again", prompts["poison"]))
        submit(engine, recorder, request("after", [1, 2]))
        recorder.wait("after")
        assert engine.num_restarts == restarts
    finally:
        engine.close()


def test_a_failing_step_counts_as_a_death_and_its_culprit_is_found(recorder: Recorder) -> None:
    engine = ProcessEngine(spec("open_failing", fail_token=500), recorder)
    try:
        submit(engine, recorder, request("bad", [500]), request("good", [1, 2]))
        recorder.wait("bad", "good")
        assert "the device is lost" in (recorder.finished["bad"].error or "")
        assert recorder.tokens["good"][0] == expected([1, 2])
    finally:
        engine.close()


def test_a_failing_step_in_process_ends_every_request_with_the_reason(recorder: Recorder) -> None:
    engine = InProcessEngine(spec("open_failing", fail_token=500), recorder)
    submit(engine, recorder, request("bad", [500]))
    recorder.wait("bad")
    assert recorder.finished["bad"].error_kind == "engine"
    assert "the device is lost" in (recorder.finished["bad"].error or "")
    assert not engine.is_alive
    with pytest.raises(EngineDeadError, match="the device is lost"):
        engine.add_request(request("next", [1]))
    engine.close()


def test_a_hung_engine_is_replaced_and_the_streams_go_on(recorder: Recorder, tmp_path: Path) -> None:
    engine = ProcessEngine(spec("open_hanging", marker=str(tmp_path / "hung")), recorder, step_timeout_s=1.5)
    try:
        time.sleep(2.0)
        assert engine.num_restarts == 0, "an idle engine is silent and does not hang"
        submit(engine, recorder, request("a", [1, 2]), request("b", [3], SEEDED))
        recorder.wait("a", "b")
        assert engine.num_restarts == 1
        assert recorder.tokens["a"][0] == expected([1, 2])
        calm = Recorder()
        undisturbed = InProcessEngine(spec(), calm)
        submit(undisturbed, calm, request("b", [3], SEEDED))
        calm.wait("b")
        undisturbed.close()
        assert recorder.tokens["b"] == calm.tokens["b"]
    finally:
        engine.close()


def test_a_request_that_hangs_the_engine_is_refused_alone(recorder: Recorder, tmp_path: Path) -> None:
    marker = tmp_path / "never by itself"
    marker.touch()
    engine = ProcessEngine(
        spec("open_hanging", marker=str(marker), hang_token=500), recorder, step_timeout_s=1.0, max_restarts=3
    )
    try:
        submit(engine, recorder, request("bad", [500]), request("good", [1, 2]))
        recorder.wait("bad", "good")
        assert "had not finished a step for 1 s" in (recorder.finished["bad"].error or "")
        assert recorder.tokens["good"][0] == expected([1, 2])
    finally:
        engine.close()


def test_steps_that_bring_nothing_to_tell_are_no_silence(recorder: Recorder) -> None:
    """A long prompt in small chunks: no token for longer than the limit, and a heartbeat all the while."""
    config = msgspec.structs.replace(CONFIG, max_prefill_chunk=8)
    engine = ProcessEngine(spec(config=config, step_s=0.2), recorder, step_timeout_s=2.5)
    try:
        short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        submit(engine, recorder, request("a", list(range(144)), short))
        recorder.wait("a")
        assert engine.num_restarts == 0
    finally:
        engine.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_closing_drains_up_to_the_limit(client: type[EngineClient], recorder: Recorder) -> None:
    engine = client(spec(step_s=0.005), recorder)  # type: ignore[call-arg]
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    submit(engine, recorder, request("short", [1, 2]), request("long", [3, 4], long))
    recorder.wait_for_tokens(4)
    started = time.monotonic()
    engine.close(drain_s=0.5)
    assert time.monotonic() - started < 5
    assert recorder.tokens["short"][0] == expected([1, 2])
    assert recorder.finished["long"].error_kind == "engine"
    assert "shut down" in (recorder.finished["long"].error or "")
    assert len(recorder.tokens["long"][0]) > 32
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request(request("late", [1]))
    engine.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_second_close_cuts_the_drain_short(client: type[EngineClient], recorder: Recorder) -> None:
    """Case 21, as far as the engine goes."""
    engine = client(spec(step_s=0.02), recorder)  # type: ignore[call-arg]
    submit(engine, recorder, request("long", [3, 4], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)))
    recorder.wait_for_tokens(2)
    first = threading.Thread(target=engine.close, args=(60.0,))
    started = time.monotonic()
    first.start()
    time.sleep(0.1)
    engine.close(0.0)
    first.join(10)
    assert not first.is_alive()
    assert time.monotonic() - started < 5


def test_signals_for_the_whole_group_leave_the_engine_to_its_client(engine: ProcessEngine, recorder: Recorder) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.ready.pid, number)
    submit(engine, recorder, request("a", [1, 2]))
    recorder.wait("a")
    assert engine.num_restarts == 0


def test_nothing_is_left_after_close(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ProcessEngine(spec(), recorder).close()  # whatever the first one loads for good
    threads, files, memory = threading.active_count(), open_files(), set(os.listdir("/dev/shm"))
    for _ in range(3):
        engine = ProcessEngine(spec(), recorder)
        assert not list(tmp_path.iterdir()), "the socket's folder outlives the connection"
        pid = engine.ready.pid
        os.kill(pid, signal.SIGKILL)
        assert engine.call("ping").result(30) == "pong"
        pids = {pid, engine.ready.pid}
        engine.close()
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ArtifactError):
        ProcessEngine(spec("open_broken", error="no"), recorder)
    assert threading.active_count() == threads
    assert open_files() == files
    assert set(os.listdir("/dev/shm")) <= memory
    assert not list(tmp_path.iterdir())


def test_a_socket_path_too_long_for_the_kernel_goes_elsewhere(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    engine = ProcessEngine(spec(), recorder)
    engine.close()
    assert not list(deep.iterdir())


def test_a_process_that_cannot_be_started_says_why(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineDeadError, match=r"cannot be started: .*gone"):
        ProcessEngine(spec(), recorder)


ORPHAN = """
    import os, sys, time
    from engine_clients import Recorder, request
    from runtime.client.process_engine import ProcessEngine
    from test_support_spec import SPEC
    engine = ProcessEngine(SPEC, Recorder())
    print(engine.ready.pid, flush=True)
    {ending}
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit(0)", "raise SystemExit(3)"])
def test_the_engine_dies_with_its_client_however_it_ends(tmp_path: Path, ending: str) -> None:
    data = msgspec.msgpack.encode(spec()).hex()
    (tmp_path / "test_support_spec.py").write_text(
        "import msgspec\nfrom runtime.engine_process import EngineSpec\n"
        f"SPEC = msgspec.msgpack.decode(bytes.fromhex({data!r}), type=EngineSpec)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    code = textwrap.dedent(ORPHAN).format(ending=ending)
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in found.stderr
    pid = int(found.stdout.split()[0])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
