"""The engine against the Hugging Face model in f32: is it still the same model?

Two questions are put to both. Greedy: the engine continues prompts, all in one batch, and each of its tokens must be
the one that the reference likes best after the very same prefix. Text: both read the same windows of a text, and their
distributions over the next token are compared at each position.

The engine answers first, through the runtime's own core and executor, and its logits go to a file; then the reference
answers in a process of its own. So the two never lie in memory together. The text (`parity_text.txt`) was written for
this purpose and is under this project's licence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from builder.process_memory import release_memory
from builder.recipe import ParityConfig, QualityConfig
from runtime.errors import BuildError
from runtime.manifest import Manifest, Parity
from zoo.progress import Progress

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import Executor
    from zoo.checkpoint import Checkpoint

Answers = TypeVar("Answers")

TEXT = Path(__file__).with_name("parity_text.txt")
WINDOW = 512  # tokens that are read as one sequence
MAX_LOGITS_BYTES = (
    384 << 20
)  # of the file that carries the engine's logits: bounds the positions for large vocabularies
# Prompt lengths, in turn: one token, shorter and longer than a block, and over several blocks.
PROMPT_LENGTHS = (1, 2, 4, 7, 12, 20, 33, 48, 64, 100, 160, 256)

FINER = "Choose a finer weights, kv or backend.compute dtype, or loosen the bound"

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Questions:
    """What both models are asked, in token ids."""

    prompts: list[list[int]]
    new_tokens: int  # to generate after each prompt
    windows: list[list[int]]

    @property
    def positions(self) -> int:
        """Positions of the text whose distributions are compared."""
        return sum(len(window) for window in self.windows)


def make_questions(
    tokens: list[int], prefix: list[int], config: ParityConfig, *, vocab_size: int, max_context_len: int
) -> Questions:
    """Cut the text's `tokens` into prompts and windows, each with `prefix` (BOS, where the model has one) before it.

    Prompts and windows start at even distances over the whole text. All fit into `max_context_len`.
    """
    new_tokens = max(1, min(config.new_tokens, max_context_len // 2))
    room = max(1, max_context_len - new_tokens - len(prefix))
    prompts = []
    for index in range(config.prompts):
        start = index * len(tokens) // config.prompts
        length = min(PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)], room)
        prompts.append(prefix + (tokens[start:] + tokens[:start])[:length])
    width = max(1, min(WINDOW, max_context_len) - len(prefix))
    affordable = MAX_LOGITS_BYTES // (4 * vocab_size * (width + len(prefix)))
    count = max(1, min(-(-len(tokens) // width), affordable))
    starts = [index * max(0, len(tokens) - width) // max(1, count - 1) for index in range(count)]
    return Questions(prompts, new_tokens, [prefix + tokens[start : start + width] for start in starts])


def logits_bytes(vocab_size: int) -> int:
    """The most that the file of logits takes, in bytes, for the disk estimate."""
    return max(MAX_LOGITS_BYTES, 4 * vocab_size * WINDOW)


def measure(
    artifact: Artifact,
    checkpoint: Checkpoint,
    *,
    config: ParityConfig,
    trust_remote_code: bool,
    scratch: Path,
    progress: Progress,
) -> Parity:
    """Put the questions to the engine of `artifact` and to the model in `checkpoint`, and compare.

    `scratch` is an empty folder for the logits; it is left empty.

    Raises:
        BuildError: the reference cannot be run, or the engine gives no finite logits.
    """
    logits = scratch / "logits.f32"
    try:
        progress.update("engine", 0, None)
        questions, answers = ask_artifact(artifact, checkpoint, config, ask_engine, logits)
        release_memory()  # the reference needs what the engine took
        progress.update("reference", 0, None)
        task = {"answers": answers}
        return Parity(**ask_reference(checkpoint, questions, task, logits, scratch, trust_remote_code))
    finally:
        logits.unlink(missing_ok=True)


def ask_artifact(
    artifact: Artifact,
    checkpoint: Checkpoint,
    config: ParityConfig,
    ask: Callable[[Executor, Manifest, Questions, Path], Answers],
    rows: Path,
    *,
    row_size: int | None = None,
) -> tuple[Questions, Answers]:
    """The questions for this engine and what `ask` has of it; nothing of the engine is alive afterwards.

    `ask` writes a row of `row_size` f32 (None: the vocabulary) a position of the text into the file `rows`.
    """
    from runtime.executors import open_executor

    manifest = artifact.manifest
    executor = open_executor(artifact)
    try:
        tokens, prefix = read_text(artifact.path, executor.vocab_size, checkpoint.name)
        questions = make_questions(
            tokens,
            prefix,
            config,
            vocab_size=row_size or executor.vocab_size,
            max_context_len=manifest.limits.max_context_len,
        )
        return questions, ask(executor, manifest, questions, rows)
    finally:
        executor.close()


def check_quality(parity: Parity | None, bounds: QualityConfig) -> None:
    """Raise `BuildError` with the figure and the bound for each bound of the recipe that does not hold."""
    wanted = [name for name in bounds.__struct_fields__ if name != "min_cosine" and getattr(bounds, name) is not None]
    if not wanted:
        return
    if parity is None:
        raise BuildError(f"quality.{wanted[0]} needs the comparison that parity.enabled: false turns off; turn it on")
    broken = []
    if bounds.max_kl is not None and not parity.mean_kl <= bounds.max_kl:
        broken.append(f"mean KL is {parity.mean_kl:.3g} nats, over quality.max_kl {bounds.max_kl:g}")
    if bounds.min_top1 is not None and not parity.top1_agreement >= bounds.min_top1:
        broken.append(f"top-1 agreement is {parity.top1_agreement:.4f}, under quality.min_top1 {bounds.min_top1:g}")
    ratio = parity.perplexity / parity.reference_perplexity
    if bounds.max_perplexity_ratio is not None and not ratio <= bounds.max_perplexity_ratio:
        broken.append(
            f"perplexity is {parity.perplexity:.3f} to the reference's {parity.reference_perplexity:.3f}, a ratio of "
            f"{ratio:.4f}, over quality.max_perplexity_ratio {bounds.max_perplexity_ratio:g}"
        )
    if broken:
        raise BuildError(f"the engine is not good enough: {'; '.join(broken)}. {FINER}")


def ask_engine(executor: Executor, manifest: Manifest, questions: Questions, logits: Path) -> list[list[int]]:
    """The greedy continuation of each prompt; the text's logits, f32 [positions, vocab], go to the file `logits`."""
    from runtime.config import EngineConfig
    from runtime.engine_core import EngineCore
    from runtime.messages import EngineRequest
    from runtime.sampling_params import SamplingParams

    layout = executor.kv_layout
    lengths = [len(prompt) + questions.new_tokens for prompt in questions.prompts]
    lengths += [len(window) for window in questions.windows]
    most = max(lengths) + sum(lengths[: min(len(questions.prompts), manifest.limits.max_num_seqs)])
    blocks = -(-most // layout.block_size) + manifest.limits.max_num_seqs + 1
    executor.allocate(blocks)
    core = EngineCore(executor, EngineConfig.from_manifest(manifest, num_blocks=blocks, enable_prefix_caching=False))
    params = SamplingParams(temperature=0.0, max_tokens=questions.new_tokens, ignore_eos=True, seed=0)
    for index, prompt in enumerate(questions.prompts):
        request = EngineRequest(
            request_id=str(index), prompt_token_ids=prompt, params=params, arrival_time=time.monotonic()
        )
        core.add_request(request)
    answers: list[list[int]] = [[] for _ in questions.prompts]
    while core.has_work():
        for delta in core.step().deltas:
            if delta.error is not None:
                raise BuildError(f"the engine refused a parity prompt: {delta.error}")
            for sequence in delta.sequences:
                answers[int(delta.request_id)] += sequence.new_token_ids
    core.close()
    read_windows(executor, questions, manifest, logits)
    return answers


def read_windows(executor: Executor, questions: Questions, manifest: Manifest, target: Path) -> None:
    """Write the executor's rows of output for each position of the text into the file `target`, f32.

    Raises `BuildError` where they are not finite.
    """
    with target.open("wb") as file:
        for window in questions.windows:
            for rows in _read_window(executor, window, manifest.limits.max_num_batched_tokens):
                if not np.isfinite(rows).all():
                    raise BuildError("the engine's output is not finite; choose a wider backend.compute dtype")
                rows.tofile(file)


def _read_window(executor: Executor, window: list[int], chunk: int) -> Any:
    """The output [T, V] of each chunk of `window`, read as one sequence from its start."""
    from runtime.executor import StepBatch

    block_size = executor.kv_layout.block_size
    for start in range(0, len(window), chunk):
        tokens = np.array(window[start : start + chunk], np.int64)
        end = start + len(tokens)
        table = np.arange(-(-end // block_size), dtype=np.int32)
        yield executor.run(
            StepBatch(
                token_ids=tokens,
                positions=np.arange(start, end, dtype=np.int64),
                past_lens=np.array([start], np.int32),
                query_starts=np.array([0, len(tokens)], np.int32),
                block_ids=table,
                block_starts=np.array([0, len(table)], np.int32),
                max_context_len=end,
                logits_rows=np.arange(len(tokens), dtype=np.int64),
            )
        )


def read_text(folder: Path, vocab_size: int, name: str) -> tuple[list[int], list[int]]:
    """The text's token ids, and those that the tokenizer puts before any text.

    Raises `BuildError` where the tokenizer of the model `name` knows more tokens than the model.
    """
    from runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    text = TEXT.read_text(encoding="utf-8").replace("\n---\n", "\n")
    bos = tokenizer.bos_token_id
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if max(tokens) >= vocab_size:
        raise BuildError(
            f"{name}: its tokenizer gives the token id {max(tokens)}, and the model knows ids below {vocab_size}: "
            "tokenizer.json belongs to another model"
        )
    return tokens, [bos] if tokenizer.adds_bos and bos is not None else []


def ask_reference(
    checkpoint: Checkpoint, questions: Questions, answers: dict[str, Any], output: Path, scratch: Path, trust: bool
) -> dict[str, Any]:
    """Run `builder.parity_reference` on the questions and return its figures.

    `answers` are the engine's, in the form that it reads; `output` is the file that `read_windows` wrote.
    """
    task = answers | {
        "folder": str(checkpoint.folder),
        "trust_remote_code": trust,
        "prompts": questions.prompts,
        "windows": questions.windows,
        "output": str(output),
        "parent": os.getpid(),
    }
    path = scratch / "questions.json"
    path.write_text(json.dumps(task))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that wait by spinning made the comparison ten times slower on a busy machine (measured).
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-m", "builder.parity_reference", str(path)]
    # A session of its own: Ctrl-C reaches the build alone, which then ends its helper.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, complaints = process.communicate()
    finally:
        process.kill()
        process.wait()
        path.unlink(missing_ok=True)
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    advice = "set parity.enabled: false to build without the comparison"
    if process.returncode < 0:
        raise BuildError(
            f"the Hugging Face model was killed by signal {-process.returncode} (9: out of memory) while it was "
            f"compared; {advice}"
        )
    last = (complaints.strip().splitlines() or ["no message"])[-1]
    raise BuildError(f"the Hugging Face model could not be run for comparison: {last[:300]}; {advice}")
