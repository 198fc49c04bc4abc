"""`plancast generate` and `plancast chat` as processes: what they print, how they end, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_model import HashModelExecutor
from tiny_served import ROOT, executor_environment, write_served_artifact

from runtime.tokenizer import Tokenizer

GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "8")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_artifact(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(artifact: Path) -> Tokenizer:
    return Tokenizer.load(artifact)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "plancast", *map(str, arguments)]


def run(*arguments: object, stdin: str | None = None, factory: str = "open_hash") -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        command(*arguments),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        env=executor_environment(factory),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in found.stderr, found.stderr
    return found


def expected(tokenizer: Tokenizer, prompt: Sequence[int], length: int = 8) -> str:
    model, history = HashModelExecutor(512), list(prompt)
    for _ in range(length):
        history.append(int(model.logits_after(history).argmax()))
    return tokenizer.decode(history[len(prompt) :])


def test_one_prompt_streams_and_says_what_it_cost(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "Paris is", *GREEDY)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected(tokenizer, tokenizer.encode("Paris is")) + "\n"
    loaded, cost = found.stderr.splitlines()
    assert re.match(r"tiny-byte_level: loaded in \d+\.\d\d s .* KV blocks in .*", loaded)
    pattern = r"TTFT \d+ ms \| TPOT [\d.]+ ms \| 8 tokens, [\d.]+ tokens/s \| (\d+) of (\d+) KV blocks used"
    blocks = re.fullmatch(pattern, cost)
    assert blocks, cost
    assert int(blocks[1]) == -(-(len(tokenizer.encode("Paris is")) + 7) // 4)


def test_quiet_prints_nothing_else(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "--quiet", *GREEDY, stdin="Paris is\n")
    assert found.stdout == expected(tokenizer, tokenizer.encode("Paris is")) + "\n"
    assert found.stderr == ""


def test_a_chat_goes_through_the_template(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "--chat", "--system", "Be brief.", "Where?", "-q", *GREEDY)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    assert found.stdout == expected(tokenizer, tokenizer.encode(text, add_special_tokens=False)) + "\n"


def test_several_prompts_run_in_one_batch(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "Paris is", "Praha je", *GREEDY, "-q")
    one, two = (expected(tokenizer, tokenizer.encode(prompt)).strip("\n") for prompt in ("Paris is", "Praha je"))
    assert found.stdout == f"[1] Paris is\n{one}\n[2] Praha je\n{two}\n"
    loud = run("generate", artifact, "Paris is", "Praha je", *GREEDY)
    assert re.search(r"2 requests \| mean TTFT \d+ ms", loud.stderr)


def test_json_holds_everything(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "Paris is", "--json", "--logprobs", "1", *GREEDY, "-q")
    record = json.loads(found.stdout)
    assert record["prompt"] == "Paris is"
    (output,) = record["outputs"]
    assert output["text"] == expected(tokenizer, tokenizer.encode("Paris is"))
    assert output["finish_reason"] == "length"
    assert len(output["logprobs"]) == len(output["token_ids"]) == 8
    assert record["usage"] == {
        "prompt_tokens": len(tokenizer.encode("Paris is")),
        "completion_tokens": 8,
        "cached_tokens": 0,
    }


def test_samples_and_beams(artifact: Path) -> None:
    sampling = ("--temperature", "1", "--seed", "5", "--max-tokens", "8", "--ignore-eos")
    record = json.loads(run("generate", artifact, "Paris", "-n", "3", *sampling, "--json", "-q").stdout)
    assert len({output["text"] for output in record["outputs"]}) == 3
    again = json.loads(run("generate", artifact, "Paris", "-n", "3", *sampling, "--json", "-q").stdout)
    assert again["outputs"] == record["outputs"]
    beams = run("generate", artifact, "Paris", "--beam-width", "3", "--max-tokens", "5", "-q")
    assert beams.returncode == 0
    assert beams.stdout.startswith("[1] Paris\n")


def test_a_jsonl_file_in_and_out(artifact: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    requests = [
        {"prompt": "Paris is", "id": "a"},
        {"messages": [{"role": "user", "content": "Where?"}], "params": {"max_tokens": 3}},
        {"prompt_token_ids": [5, 6, 7], "params": {"max_tokens": 2}, "id": 7},
        {"prompt_token_ids": [1] * 40},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)) + "\n\n")
    found = run("generate", artifact, "--input", source, "--output", target, *GREEDY)
    assert found.returncode == 0, found.stderr
    assert found.stdout == ""
    assert "4/4" in found.stderr
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record.get("id") for record in records] == ["a", None, 7, None]
    assert records[0]["outputs"][0]["text"] == expected(tokenizer, tokenizer.encode("Paris is"))
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [8, 3, 2, 8]
    assert records[1]["messages"] == requests[1]["messages"]
    assert not list(tmp_path.glob("*.partial"))
    printed = run("generate", artifact, "--input", source, *GREEDY, "-q")
    drop = "ttft_s"
    assert [
        {key: value for key, value in json.loads(line).items() if key != drop} for line in printed.stdout.splitlines()
    ] == [{key: value for key, value in record.items() if key != drop} for record in records]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "in.jsonl:2: not JSON"),
        ("[1]", "in.jsonl:2: a request is a JSON object"),
        ('{"prompt": "x", "colour": 1}', "in.jsonl:2: unknown key 'colour'"),
        ('{"prompt": "x", "messages": []}', "in.jsonl:2: give exactly one of"),
        ("{}", "in.jsonl:2: give exactly one of"),
        ('{"prompt": 5}', "in.jsonl:2: prompt must be text"),
        ('{"prompt": ""}', "in.jsonl:2: the prompt is empty"),
        ('{"prompt_token_ids": [9999]}', "in.jsonl:2: the prompt holds 9999"),
        ('{"messages": []}', "in.jsonl:2: "),
        ('{"prompt": "x", "params": 5}', "in.jsonl:2: params must be an object"),
        ('{"prompt": "x", "params": {"temprature": 1}}', "in.jsonl:2: unknown sampling parameter 'temprature'"),
        ('{"prompt": "x", "params": {"temperature": "hot"}}', "in.jsonl:2: params: "),
        ('{"prompt": "x", "params": {"temperature": -1}}', "in.jsonl:2: temperature must be"),
        ('{"prompt": "x", "params": {"max_tokens": 1000}}', "in.jsonl:2: "),
        ("[" * 100_000, "in.jsonl:2: "),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(artifact: Path, tmp_path: Path, line: str, problem: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    target.write_text("older\n")
    found = run("generate", artifact, "--input", source, "--output", target, "-q")
    assert found.returncode == 2
    assert found.stdout == ""
    (message,) = found.stderr.splitlines()
    assert message.startswith("error: ")
    assert problem in message
    assert target.read_text() == "older\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_is_wrong_is_one_line_and_exit_code_two(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "one.jsonl").write_text('{"prompt": "x"}\n')
    cases: list[tuple[list[object], str | None, str]] = [
        (["generate", tmp_path / "none", "x"], None, "no such artifact"),
        (["generate", artifact], "", "is empty"),
        (["generate", artifact, "x", "--input", tmp_path / "one.jsonl"], None, "not both"),
        (["generate", artifact, "x", "--system", "y"], None, "--chat"),
        (["generate", artifact, "--input", tmp_path / "gone.jsonl"], None, "No such file"),
        (["generate", artifact, "--input", tmp_path], None, "directory"),
        (["generate", artifact, "--input", tmp_path / "empty.jsonl"], None, "holds no request"),
        (["generate", artifact, "--input", tmp_path / "binary.jsonl"], None, "not UTF-8"),
        (["generate", artifact, "x", "--output", tmp_path / "no" / "out"], None, "no such folder"),
        (["generate", artifact, "x", "--output", tmp_path, "-q"], None, "directory"),
        (["generate", artifact, "x", "--temperature", "-1", "-q"], None, "temperature must be"),
        (["generate", artifact, "x", "--max-tokens", "300", "-q"], None, "256"),
        (["generate", artifact, "x", "--kv-cache-memory", "lots"], None, "not a size"),
        (["generate", artifact, "x", "--scheduling-policy", "lifo"], None, "lifo"),
        (["chat", artifact, "--temperature", "-1", "-q"], "", "temperature must be"),
        (["chat", tmp_path / "none"], "", "no such artifact"),
    ]
    for arguments, stdin, problem in cases:
        found = run(*arguments, stdin=stdin)
        assert found.returncode == 2, (arguments, found)
        assert found.stdout == ""
        assert problem in found.stderr.splitlines()[-1], (arguments, found.stderr)
        assert found.stderr.splitlines()[-1].startswith("error: ")


def test_an_engine_of_its_own_process_does_the_same(artifact: Path, tokenizer: Tokenizer) -> None:
    found = run("generate", artifact, "Paris is", "--separate-process", "-q", *GREEDY)
    assert found.stdout == expected(tokenizer, tokenizer.encode("Paris is")) + "\n"


def test_options_reach_the_engine(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    found = run("generate", artifact, "x", "--iteration-log", log, "--kv-cache-memory", "64KiB", *GREEDY)
    assert "64.0 KiB asked for" in found.stderr
    assert len(log.read_text().splitlines()) >= 8


@pytest.mark.parametrize("separate", [(), ("--separate-process",)])
def test_ctrl_c_ends_with_a_word_and_no_traceback(artifact: Path, separate: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        command("generate", artifact, "Paris", "--temperature", "0", "--ignore-eos", "--max-tokens", "200", *separate),
        env=executor_environment("open_slow"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    output, error = process.communicate(timeout=20)
    assert process.returncode == 130, error
    assert error.splitlines()[-1] == "interrupted"
    assert "Traceback" not in error
    assert output.endswith("\n")


def test_an_interrupted_file_keeps_what_was_done_under_another_name(artifact: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt_token_ids": [i + 1]}) + "\n" for i in range(200)))
    arguments = ("--max-num-seqs", "2", "--temperature", "0", "--ignore-eos", "--max-tokens", "4", "-q")
    process = subprocess.Popen(
        command("generate", artifact, "--input", source, "--output", target, *arguments),
        env=executor_environment("open_slow"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 30
    while not (partial.exists() and partial.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    count = re.match(r"(\d+) of 200 results lie in .*out\.jsonl\.partial", error)
    assert count, error
    assert len(partial.read_text().splitlines()) == int(count[1])
    assert not target.exists()


def test_a_reader_that_goes_away_is_no_error(artifact: Path) -> None:
    process = subprocess.Popen(
        command("generate", artifact, "Paris", "--ignore-eos", "--max-tokens", "200", "-q"),
        env=executor_environment("open_slow"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.wait(20)
    assert error == ""


def test_a_chat_keeps_its_history_until_reset(artifact: Path, tokenizer: Tokenizer) -> None:
    turns = "one\n\ntwo\n/reset\none\n/system Be brief.\none\n/nothing\n/help\n/quit\nnever\n"
    found = run("chat", artifact, "-q", *("--temperature", "0", "--max-tokens", "4"), stdin=turns)
    assert found.returncode == 0, found.stderr
    assert "unknown command /nothing" in found.stderr
    assert "forget the conversation" in found.stderr

    def answer(*messages: tuple[str, str]) -> str:
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
        ids = tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False)
        model, history = HashModelExecutor(512), list(ids)
        for _ in range(4):
            history.append(int(model.logits_after(history).argmax()))
            if history[-1] == tokenizer.eos_token_id:
                break
        return tokenizer.decode(history[len(ids) :])

    first = answer(("user", "one"))
    second = answer(("user", "one"), ("assistant", first), ("user", "two"))
    briefly = answer(("system", "Be brief."), ("user", "one"))
    assert found.stdout == f"{first}\n{second}\n{first}\n{briefly}\n"


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(artifact: Path) -> None:
    turns = "".join(f"this is turn number {i} of a long conversation\n" for i in range(12))
    found = run("chat", artifact, "-q", "--temperature", "0", "--max-tokens", "20", stdin=turns)
    assert found.returncode == 0
    assert "oldest turns are forgotten" in found.stderr
    assert "error" not in found.stderr


def test_a_message_too_long_for_the_context_is_refused_and_the_chat_goes_on(artifact: Path) -> None:
    found = run("chat", artifact, "-q", "--max-tokens", "4", stdin=f"{'long ' * 400}\nshort\n")
    assert found.returncode == 0
    (message,) = found.stderr.splitlines()
    assert message.startswith("error: the prompt has ")
    assert found.stdout.count("\n") >= 1


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(arguments[0], arguments, environment)
        self.seen = ""

    def expect(self, text: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def expect_an_answer(self, timeout: float = 30.0) -> None:
        """Wait for the first text after the echoed line: only then is there an answer that could be stopped."""
        deadline = time.monotonic() + timeout
        while not re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.seen).strip():
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "no answer begins"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")

    def interrupt_prompt(self, text: str) -> None:
        """Ctrl-C at the prompt until `text` shows: Python's readline sees a signal only once it waits for a key."""
        for _ in range(10):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.expect(text, timeout=3)
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def finish(self) -> int:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"it does not end: {self.seen!r}")


def test_ctrl_c_at_the_terminal_stops_an_answer_only(artifact: Path) -> None:
    terminal = Terminal(
        command("chat", artifact, "--temperature", "0", "--max-tokens", "200"), executor_environment("open_slow")
    )
    terminal.expect("/help lists the commands")
    terminal.expect("> ")
    terminal.type("go on for ever\r")
    terminal.expect("go on for ever")
    terminal.expect_an_answer()
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.expect("> ")
    terminal.interrupt_prompt("(Ctrl-D or /quit leaves)")
    terminal.expect("> ")
    terminal.type("again\r")
    terminal.expect("again")
    terminal.expect_an_answer()
    terminal.type("\x03")
    terminal.expect("(stopped)")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.finish() == 0
    assert "Traceback" not in terminal.seen
