"""`plancast generate`: prompts from the command line, standard input or a JSONL file, through one engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from runtime.client.progress import progress_bar
from runtime.commands.common import Costs, default_params, loaded, printed, say
from runtime.errors import PlancastError, RequestError
from runtime.llm import LLM
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams

_KINDS = ("prompt", "messages", "prompt_token_ids")
_LINE_KEYS = {*_KINDS, "params", "id"}


@dataclass(slots=True)
class Job:
    """One request: what to complete, how, and where it was read."""

    kind: str  # prompt | messages | prompt_token_ids
    value: Any
    params: dict[str, Any]  # on top of the command line's
    id: Any = None
    where: str = ""


@dataclass(kw_only=True)
class GenerateCommand:
    """The arguments of `plancast generate`, checked and run."""

    artifact: Path
    engine_options: dict[str, Any]
    sampling: dict[str, Any]
    prompts: list[str]
    chat: bool
    system: str | None
    input: Path | None
    output: Path | None
    as_json: bool
    quiet: bool

    def run(self) -> None:
        """Raises `PlancastError` for whatever is wrong, before the engine is loaded where it shows by then."""
        if self.input is not None and self.prompts:
            raise PlancastError("give prompts or --input, not both")
        if self.system is not None and not self.chat:
            raise PlancastError("--system goes with --chat: a plain completion has no system message")
        if self.output is not None:
            check_target(self.output)
        jobs = self._jobs()
        with loaded(self.artifact, self.engine_options, quiet=self.quiet) as llm:
            params = default_params(llm, self.sampling, temperature=0.0)
            costs = Costs(llm.manifest.kv.block_size)
            plain = self.output is None and not self.as_json and self.input is None
            if plain and len(jobs) == 1 and params.n == 1 and not params.beam_width:
                self._stream(llm, jobs[0], params, costs)
            else:
                self._run_all(llm, jobs, params, costs, plain=plain)
            if not self.quiet:
                say(costs.line(llm))

    # Input

    def _jobs(self) -> list[Job]:
        if self.input is not None:
            return list(read_jobs(self.input))
        return [self._job(prompt) for prompt in self.prompts or [self._read_stdin()]]

    def _job(self, prompt: str) -> Job:
        if not self.chat:
            return Job("prompt", prompt, {})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Job("messages", [*system, {"role": "user", "content": prompt}], {})

    def _read_stdin(self) -> str:
        if sys.stdin is None or sys.stdin.closed:
            raise PlancastError("there is no prompt: give one as an argument, on standard input, or with --input")
        if sys.stdin.isatty() and not self.quiet:
            say("Reading the prompt from the terminal; Ctrl-D ends it.")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise PlancastError(f"standard input is not {error.encoding} text: {error.reason}") from None
        text = text.removesuffix("\n")
        if not text:
            raise PlancastError("the prompt on standard input is empty: give one as an argument, or with --input")
        return text

    # Output

    def _stream(self, llm: LLM, job: Job, params: SamplingParams, costs: Costs) -> None:
        whole: RequestOutput | None = None
        with printed(llm.stream(as_prompt(llm, job), params)) as outputs:
            for output in outputs:
                if whole is None:
                    whole = output
                else:
                    whole.add(output)
        assert whole is not None
        costs.add(whole)

    def _run_all(self, llm: LLM, jobs: list[Job], params: SamplingParams, costs: Costs, *, plain: bool) -> None:
        prompts, all_params = [], []
        for job in jobs:
            with _located(job):
                prompts.append(as_prompt(llm, job))
                all_params.append(with_changes(params, job.params))
        results = llm.as_completed(prompts, all_params, labels=[job.where for job in jobs])
        bar = nullcontext(lambda _: None) if self.quiet else progress_bar(len(jobs))
        failures = 0
        with closing(results), self._sink(len(jobs), plain=plain) as put, bar as report:
            for position, output in results:
                failures += output.error is not None
                costs.add(output)
                report(output)
                put(position, jobs[position], output)
        if failures:
            raise PlancastError(f"{failures} of {len(jobs)} requests failed; their results say why")

    @contextmanager
    def _sink(self, count: int, *, plain: bool) -> Iterator[Callable[[int, Job, RequestOutput], None]]:
        """Where results go, put into the order of the jobs: text or JSON, standard output or a file."""
        file: IO[str] = sys.stdout
        partial = None
        if self.output is not None:
            partial = self.output.with_name(self.output.name + ".partial")
            try:
                file = partial.open("w", encoding="utf-8")
            except OSError as error:
                raise PlancastError(f"--output {self.output}: {error.strerror}") from None
        written = 0
        ready: dict[int, str] = {}

        def put(position: int, job: Job, output: RequestOutput) -> None:
            nonlocal written
            ready[position] = _as_text(position, output) if plain else _as_json(position, job, output)
            while written in ready:
                file.write(ready.pop(written) + "\n")
                file.flush()
                written += 1

        try:
            yield put
        except BaseException:
            if partial is not None:
                file.close()
                if written:
                    say(f"{written} of {count} results lie in {partial}")
                else:
                    partial.unlink()
            raise
        if partial is not None:
            file.close()
            os.replace(partial, self.output)  # type: ignore[arg-type]


def check_target(path: Path) -> None:
    """Raise `PlancastError` where a file cannot lie at `path`."""
    if path.is_dir():
        raise PlancastError(f"--output {path}: is a directory, and must be a file")
    if not path.absolute().parent.is_dir():
        raise PlancastError(f"--output {path}: no such folder: {path.absolute().parent}")


def read_jobs(path: Path) -> Iterator[Job]:
    """The requests of a JSONL file. Raises `PlancastError` with the line's number for what is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise PlancastError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise PlancastError(f"{path}: {error.strerror}") from None
    found = False
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = True
            yield _parse_line(line, f"{path}:{number}")
    if not found:
        raise PlancastError(f"{path}: holds no request: one JSON object a line")


def _parse_line(line: str, where: str) -> Job:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PlancastError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise PlancastError(f"{where}: a request is a JSON object, not {line.strip()[:40]}")
    unknown = sorted(set(fields) - _LINE_KEYS)
    if unknown:
        raise PlancastError(f"{where}: unknown key {unknown[0]!r}: known are {', '.join(sorted(_LINE_KEYS))}")
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise PlancastError(f"{where}: give exactly one of {', '.join(_KINDS)}, not {' and '.join(kinds) or 'none'}")
    params = fields.get("params", {})
    if not isinstance(params, dict):
        raise PlancastError(f"{where}: params must be an object of sampling parameters")
    value = fields[kinds[0]]
    expected = {"prompt": str, "messages": list, "prompt_token_ids": list}[kinds[0]]
    if not isinstance(value, expected):
        raise PlancastError(f"{where}: {kinds[0]} must be {'text' if expected is str else 'a list'}")
    return Job(kinds[0], value, params, fields.get("id"), where)


def as_prompt(llm: LLM, job: Job) -> Any:
    """The prompt for the engine. Raises `RequestError` where a conversation cannot be rendered."""
    if job.kind == "messages":
        return llm.chat_prompt(job.value)
    return {job.kind: job.value}


def with_changes(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """`params` with a request's own on top. Raises `RequestError` for an unknown name or a wrong type."""
    if not changes:
        return params
    unknown = sorted(set(changes) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise RequestError(f"unknown sampling parameter {unknown[0]!r}", unknown[0])
    try:
        return msgspec.convert(msgspec.structs.asdict(params) | changes, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"params: {error}") from None


@contextmanager
def _located(job: Job) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}" if job.where else str(error), error.param) from None


def _as_text(position: int, output: RequestOutput) -> str:
    if output.error is not None:
        return f"[{position + 1}] error: {output.error}"
    shown = (output.prompt or "").strip().splitlines() or [f"{len(output.prompt_token_ids)} tokens"]
    head = shown[-1] if len(shown[-1]) <= 72 else shown[-1][:71] + "…"
    texts = [sequence.text.strip("\n") for sequence in output.outputs]
    if len(texts) > 1:
        texts = [f"({index + 1}) {text}" for index, text in enumerate(texts)]
    return "\n".join([f"[{position + 1}] {head}", *texts])


def _as_json(position: int, job: Job, output: RequestOutput) -> str:
    metrics = output.metrics
    record: dict[str, Any] = {"index": position}
    if job.id is not None:
        record["id"] = job.id
    record[job.kind] = job.value
    if output.error is not None:
        return json.dumps(record | {"error": str(output.error)}, ensure_ascii=False)
    record["outputs"] = [
        {
            "text": sequence.text,
            "token_ids": sequence.token_ids,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        | ({} if sequence.logprobs is None else {"logprobs": [_logprobs(entry) for entry in sequence.logprobs]})
        for sequence in output.outputs
    ]
    record["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(sequence.token_ids) for sequence in output.outputs),
        "cached_tokens": metrics.num_cached_tokens,
    }
    if metrics.first_token_time is not None:
        record["ttft_s"] = round(metrics.first_token_time - metrics.arrival_time, 6)
    return json.dumps(record, ensure_ascii=False)


def _logprobs(entry: dict[int, Any]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "token": logprob.decoded_token,
            "bytes": list(logprob.token_bytes),
            "logprob": logprob.logprob,
        }
        for token_id, logprob in entry.items()
    ]
