"""A model that can be served without a backend: a complete artifact with a tiny tokenizer, and executors to run it.

`LLM(write_served_artifact(folder), executor_factory="tiny_served:open_hash")` is a whole engine, in this process or in
one of its own; for the command line set `executor_environment()`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_artifact import tiny_manifest
from tiny_model import HashModelExecutor, TinyEmbedder, TinyModelExecutor
from tiny_tokenizer import tiny_backend, write_tiny_tokenizer

from runtime.artifact_writer import ArtifactWriter
from runtime.executor import StepBatch
from runtime.manifest import BackendInfo, EmbeddingInfo, Limits, ModelInfo, Pooling, RuntimeDefaults

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
DEADLY_EXIT_CODE = 7


def write_served_artifact(
    folder: Path,
    kind: str = "byte_level",
    *,
    max_context_len: int = 256,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    num_kv_bytes: int | None = None,
    pooling: Pooling | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write an artifact with a tiny tokenizer of `kind`, whose engine file is empty. Returns its folder.

    With `pooling` it embeds (for `open_embedder`).
    """
    embedding = None if pooling is None else EmbeddingInfo(size=32, pooling=pooling, normalize=True)
    with ArtifactWriter(folder) as writer:
        write_tiny_tokenizer(writer.path, kind)
        if chat_template is not None:
            (writer.path / "chat_template.jinja").write_text(chat_template)
        (writer.path / "engine.xml").write_bytes(b"<net/>")
        generation = json.loads((writer.path / "generation_config.json").read_text())
        vocab_size = tiny_backend(kind).get_vocab_size()
        writer.commit(
            tiny_manifest(
                name=f"tiny-{kind}",
                model=ModelInfo(
                    name=f"tiny-{kind}",
                    architecture="LlamaForCausalLM",
                    family="llama",
                    source="folder",
                    context_length=max_context_len,
                    vocab_size=vocab_size,
                    num_layers=2,
                    hidden_size=32,
                    num_parameters=1000,
                    bos_token_id=generation.get("bos_token_id"),
                    eos_token_ids=[generation["eos_token_id"]] if "eos_token_id" in generation else [],
                ),
                backend=BackendInfo(
                    name="openvino", version=importlib.metadata.version("openvino"), engine="engine.xml"
                ),
                limits=Limits(
                    max_context_len=max_context_len,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                ),
                defaults=RuntimeDefaults(kv_cache_memory=num_kv_bytes),
                embedding=embedding,
            )
        )
    return folder


def executor_environment(factory: str = "open_hash") -> dict[str, str]:
    """The environment under which a `plancast` process serves such artifacts with a factory of this module."""
    paths = [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PLANCAST_EXECUTOR_FACTORY": f"tiny_served:{factory}", "PYTHONPATH": os.pathsep.join(paths)}


def open_tiny(artifact: Any = None, *, num_threads: int | None = None, vocab_size: int = 512, **options: Any):
    """The random transformer, with the artifact's vocabulary."""
    return TinyModelExecutor(vocab_size=_vocab_size(artifact, vocab_size), **options)


def open_embedder(artifact: Any = None, *, num_threads: int | None = None, vocab_size: int = 512, **options: Any):
    """The random transformer without its head."""
    return TinyEmbedder(vocab_size=_vocab_size(artifact, vocab_size), **options)


def open_hash(
    artifact: Any = None, *, num_threads: int | None = None, vocab_size: int = 512, step_s: float = 0.0, **options: Any
):
    """The hash model; each step takes at least `step_s` seconds."""
    return SlowHashModel(_vocab_size(artifact, vocab_size), step_s=step_s, **options)


def open_slow(artifact: Any = None, *, num_threads: int | None = None):
    """The hash model at 50 steps a second: slow enough to be interrupted."""
    return open_hash(artifact, step_s=0.02)


def open_poisoned(
    artifact: Any = None,
    *,
    num_threads: int | None = None,
    deadly_tokens: list[int],
    vocab_size: int = 512,
    **options: Any,
):
    """The hash model, whose process dies at once when it reads one of `deadly_tokens`."""
    return PoisonedModel(_vocab_size(artifact, vocab_size), deadly_tokens=deadly_tokens, **options)


def open_failing(artifact: Any = None, *, num_threads: int | None = None, fail_token: int, vocab_size: int = 512):
    """The hash model, which raises when it reads `fail_token`."""
    return FailingModel(_vocab_size(artifact, vocab_size), fail_token=fail_token)


def open_hanging(
    artifact: Any = None, *, num_threads: int | None = None, marker: str, hang_token: int = -1, vocab_size: int = 512
):
    """The hash model, whose process hangs in its fifth step, once (`marker` is a file), and whenever it reads
    `hang_token`."""
    return HangingModel(_vocab_size(artifact, vocab_size), marker=Path(marker), hang_token=hang_token)


def open_broken(artifact: Any = None, *, num_threads: int | None = None, error: str, plain: bool = False):
    """Never opens: raises an error of ours, or a plain one."""
    from runtime.errors import ArtifactError

    raise (ValueError if plain else ArtifactError)(error)


def open_once(artifact: Any = None, *, num_threads: int | None = None, marker: str = "", times: int = 1):
    """The hash model the first `times` times; afterwards loading kills the process. `marker` is a file to count in."""
    opened = Path(marker)
    count = len(opened.read_bytes()) if opened.exists() else 0
    if count >= times:
        os.kill(os.getpid(), signal.SIGKILL)
    opened.write_bytes(b"x" * (count + 1))
    return open_hash(artifact, step_s=0.005)


class SlowHashModel(HashModelExecutor):
    def __init__(self, vocab_size: int, *, step_s: float = 0.0, **options: Any):
        super().__init__(vocab_size, **options)
        self.step_s = step_s

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        if self.step_s:
            time.sleep(self.step_s)
        return super().run(batch)


class PoisonedModel(SlowHashModel):
    def __init__(self, vocab_size: int, *, deadly_tokens: list[int], **options: Any):
        super().__init__(vocab_size, **options)
        self.deadly_tokens = deadly_tokens

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        if np.isin(batch.token_ids, self.deadly_tokens).any():
            os._exit(DEADLY_EXIT_CODE)
        return super().run(batch)


class HangingModel(HashModelExecutor):
    def __init__(self, vocab_size: int, *, marker: Path, hang_token: int):
        super().__init__(vocab_size)
        self.marker, self.hang_token = marker, hang_token

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        if (batch.token_ids == self.hang_token).any() or (self.steps == 5 and not self.marker.exists()):
            self.marker.touch()
            time.sleep(3600)
        return super().run(batch)


class FailingModel(HashModelExecutor):
    def __init__(self, vocab_size: int, *, fail_token: int):
        super().__init__(vocab_size)
        self.fail_token = fail_token

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        if (batch.token_ids == self.fail_token).any():
            raise RuntimeError("the device is lost")
        return super().run(batch)


def _vocab_size(artifact: Any, default: int) -> int:
    return default if artifact is None else artifact.manifest.model.vocab_size
