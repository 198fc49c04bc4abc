"""Opens the artifact that drafts, beside the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import ArtifactError, PlancastError
from runtime.speculation.config import SpeculationConfig
from runtime.speculation.vocabulary import DraftVocabulary, head_vocabulary, match_vocabularies

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import Executor
    from runtime.sampler import Sampler
    from runtime.speculation.draft_engine import DraftEngine


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """A draft's artifact (a head's: its target's, seen as its own) with its executor, whose cache is yet to be sized by
    the target's."""

    artifact: Artifact
    executor: Executor
    vocabulary: DraftVocabulary | None

    def engine(self, config: SpeculationConfig, sampler: Sampler, num_tokens: int, *, caching: bool) -> DraftEngine:
        """The drafting engine, its KV cache made for `num_tokens` tokens. `sampler`: the target's."""
        from runtime.speculation.draft_engine import DraftEngine
        from runtime.speculation.head_engine import HeadEngine

        if not self.executor.num_blocks:
            self.executor.allocate(max(1, num_tokens // self.executor.kv_layout.block_size))
        limits = self.artifact.manifest.limits
        shared: dict[str, Any] = {
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_context_len": limits.max_context_len,
            "drawn": config.draft_sampling == "probabilistic",
            "vocabulary": self.vocabulary,
        }
        if "eagle" in config.method:
            return HeadEngine(self.executor, sampler, **shared)
        return DraftEngine(self.executor, sampler, **shared, enable_prefix_caching=caching)


def open_draft(
    config: SpeculationConfig, target: Artifact, factory: Callable[..., Executor], factory_args: dict[str, Any]
) -> OpenDraft | None:
    """The draft that `config` names, where it names one, for the target's artifact.

    Raises `PlancastError`: there is none at that path, it does not load, or its vocabulary is another.
    """
    from runtime.artifact import Artifact

    if "eagle" in config.method:
        head = target.draft_head()
        if head is None:
            raise ArtifactError(
                f"{target.path}: has no head to draft with (method eagle): build one in with `draft_head` in its "
                f"recipe: plancast build {target.manifest.name} --set draft_head=HEAD --force"
            )
        return OpenDraft(head, factory(head, **factory_args), head_vocabulary(target))
    if "draft_model" not in config.method or config.model is None:
        return None
    artifact = Artifact.open(draft_folder(config.model, target.path))
    vocabulary = match_vocabularies(target, artifact)
    return OpenDraft(artifact, factory(artifact, **factory_args), vocabulary)


def draft_folder(model: str, target: Path) -> Path:
    """Where the draft `model` is: a path as it is, or one beside (or in) the target's folder.

    Raises `PlancastError` that lists where it was looked for.
    """
    path = Path(model).expanduser()
    places = [path] if path.is_absolute() else [path, target.parent / path, target / path]
    for place in places:
        if place.is_dir():
            return place.resolve()
    looked = ", ".join(str(place) for place in places)
    raise PlancastError(
        f"no draft artifact {model!r}: looked for {looked}. Build one with plancast build, or train one with plancast "
        f"draft train"
    )
