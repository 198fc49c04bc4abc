"""An embedding engine against the Hugging Face model in f32: the same vectors for prompts, the same hidden states.

As `builder.parity`, whose prompts and text it takes: the engine answers first, the reference in a process of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from builder.parity import FINER, Questions, ask_artifact, ask_reference, read_windows
from builder.process_memory import release_memory
from builder.recipe import ParityConfig, QualityConfig
from runtime.errors import BuildError
from runtime.manifest import EmbeddingParity, Manifest
from zoo.progress import Progress

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import Executor
    from zoo.checkpoint import Checkpoint


def measure_embedding(
    artifact: Artifact,
    checkpoint: Checkpoint,
    *,
    config: ParityConfig,
    trust_remote_code: bool,
    scratch: Path,
    progress: Progress,
) -> EmbeddingParity:
    """Embed the prompts with the engine of `artifact` and with the model in `checkpoint`, and compare.

    `scratch` is an empty folder; it is left empty.

    Raises:
        BuildError: the reference cannot be run, or the engine gives what is not finite.
    """
    info = artifact.manifest.embedding
    assert info is not None
    hidden = scratch / "hidden.f32"
    try:
        progress.update("engine", 0, None)
        questions, vectors = ask_artifact(artifact, checkpoint, config, ask_embeddings, hidden, row_size=info.size)
        release_memory()  # the reference needs what the engine took
        progress.update("reference", 0, None)
        task = {"embeddings": [vector.tolist() for vector in vectors], "pooling": info.pooling}
        return EmbeddingParity(**ask_reference(checkpoint, questions, task, hidden, scratch, trust_remote_code))
    finally:
        hidden.unlink(missing_ok=True)


def check_embedding_quality(parity: EmbeddingParity | None, bounds: QualityConfig) -> None:
    """Raise `BuildError` with the figure and the bound where the bound of the recipe does not hold."""
    if bounds.min_cosine is None:
        return
    if parity is None:
        raise BuildError("quality.min_cosine needs the comparison that parity.enabled: false turns off; turn it on")
    if not parity.min_cosine >= bounds.min_cosine:
        raise BuildError(
            f"the engine is not good enough: the least cosine with the original's embedding is "
            f"{parity.min_cosine:.6f}, under quality.min_cosine {bounds.min_cosine:g}. {FINER}"
        )


def ask_embeddings(
    executor: Executor, manifest: Manifest, questions: Questions, hidden: Path
) -> list[NDArray[np.float32]]:
    """The pooled vector f32 [H] of each prompt; the text's hidden states, f32 [positions, H], go to the file `hidden`.

    Raises `BuildError` where the engine refuses a prompt, or gives what is not finite.
    """
    from runtime.config import EngineConfig
    from runtime.engine_core import EngineCore
    from runtime.messages import EngineRequest
    from runtime.sampling_params import SamplingParams

    lengths = [*map(len, questions.prompts), *map(len, questions.windows)]
    blocks = -(-sum(lengths) // executor.kv_layout.block_size) + len(lengths) + manifest.limits.max_num_seqs
    executor.allocate(blocks)
    core = EngineCore(executor, EngineConfig.from_manifest(manifest, num_blocks=blocks, enable_prefix_caching=False))
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    for index, prompt in enumerate(questions.prompts):
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_time=time.monotonic())
        )
    vectors: dict[int, NDArray[np.float32]] = {}
    while core.has_work():
        for delta in core.step().deltas:
            if delta.error is not None or delta.embedding is None:
                raise BuildError(f"the engine refused a parity prompt: {delta.error}")
            vectors[int(delta.request_id)] = np.frombuffer(delta.embedding, np.float32)
    core.close()
    read_windows(executor, questions, manifest, hidden)
    return [vectors[index] for index in range(len(questions.prompts))]
