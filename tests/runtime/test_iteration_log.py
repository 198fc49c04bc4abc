"""The iteration log says what each step did, and a cut-off one can still be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_driver import Driver, FakeClock, make_core, make_request

from runtime.errors import PlancastError
from runtime.iteration_log import read_log


def write_log(path: Path, **options) -> Driver:
    driver = Driver(make_core(iteration_log=str(path), clock=FakeClock(tick=0.001), **options))
    driver.add(make_request("a", list(range(20)), max_tokens=24, ignore_eos=True, arrival_time=1000.0))
    driver.add(make_request("b", list(range(30)), greedy=False, n=2, max_tokens=20, ignore_eos=True))
    driver.add(make_request("gone", [1], max_tokens=20))
    for _ in range(4):
        driver.step()
    driver.core.abort(["gone"])
    driver.run()
    driver.core.close()
    return driver


def test_a_log_holds_every_step(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    driver = write_log(path, num_blocks=22)
    header, steps, ends = read_log(str(path))
    assert (header.block_size, header.num_blocks, header.max_num_seqs) == (4, 22, 8)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == driver.core.stats().steps
    assert sorted((end.request_id, end.reason) for end in ends) == [("a", "finish"), ("b", "finish"), ("gone", "abort")]
    assert all(step.ms == (1.0, 1.0, 1.0, 1.0) or step.ms[2] > 0 for step in steps)
    assert sum(len(step.preempted) for step in steps) == driver.core.stats().preemptions > 0
    for request_id, index, total in (("a", 0, 43), ("b", 0, 49), ("b", 1, 49)):
        parts = [part for step in steps for part in step.seqs if part[:2] == (request_id, index)]
        assert max(past + tokens for _, _, tokens, past, _ in parts) == total
    first = steps[0].admitted[0]
    assert (first.request_id, first.num_prompt_tokens, first.num_preemptions) == ("a", 20, 0)
    for step in steps:
        assert step.decode_tokens + step.prefill_tokens == sum(part[2] for part in step.seqs)


def test_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path)
    whole = read_log(str(path))
    data = path.read_bytes()
    path.write_bytes(data + b'{"type":"step","st')
    assert read_log(str(path)) == whole
    path.write_bytes(data[:200] + b"\n" + data)
    with pytest.raises(PlancastError, match="line 2"):
        read_log(str(path))


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(PlancastError, match="cannot read"):
        read_log(str(path))
    with pytest.raises(PlancastError, match="cannot read"):
        read_log(str(tmp_path))
    for text in (b"", b"hello\n", b"[1]\n", b'{"type":"end","t":1,"request_id":"a","reason":"x"}\n', b"\xff\xfe\n"):
        path.write_bytes(text)
        with pytest.raises(PlancastError, match=r"no iteration log|no line of"):
            read_log(str(path))


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlancastError, match="cannot write the iteration log"):
        make_core(iteration_log=str(tmp_path / "absent" / "log.jsonl"))


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    driver = Driver(make_core(iteration_log="/dev/full"))
    for index in range(40):
        driver.add(make_request(str(index), list(range(30)), max_tokens=30))
    answers = driver.run()
    assert all(answer.finished for answer in answers.values())
    driver.core.close()
