"""Whether two artifacts speak of the same tokens; and drafts that know only the most frequent of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import ArtifactError
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.artifact import Artifact

# In an artifact of a draft with a reduced vocabulary: {"target_ids": [...], "unknown": n}.
DRAFT_VOCABULARY = "draft_vocabulary.json"


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Between the target's ids (V) and those of a draft that knows `D` of them.

    `to_target` i64 [D]: the target's id of each of the draft's. `to_draft` i64 [V]: the draft's id of each of the
    target's; of a token that it does not know, that of the token that stands for all such.
    """

    to_target: NDArray[np.int64]
    to_draft: NDArray[np.int64]

    @classmethod
    def of(cls, target_ids: list[int], unknown: int, vocab_size: int) -> DraftVocabulary:
        """`target_ids`: by the draft's ids. `unknown`: the draft's id for what it does not know."""
        to_target = np.array(target_ids, np.int64)
        to_draft = np.full(vocab_size, unknown, np.int64)
        to_draft[to_target] = np.arange(len(to_target))
        return cls(to_target, to_draft)


def head_vocabulary(target: Artifact) -> DraftVocabulary:
    """The vocabulary of the head in `target`. Raises `ArtifactError` where its table is none."""
    head = target.manifest.draft_head
    assert head is not None
    path, width = target.file(head.vocabulary), target.manifest.model.vocab_size
    try:
        target_ids = msgspec.json.decode(path.read_bytes(), type=_HeadTable).target_ids
        if not target_ids or not 0 <= min(target_ids) <= max(target_ids) < width:
            raise ValueError(f"ids outside of 0..{width - 1}")
    except (msgspec.DecodeError, ValueError) as error:
        raise ArtifactError(f"{path}: no table of a head's vocabulary ({error})") from None
    return DraftVocabulary.of(target_ids, len(target_ids) - 1, width)


class _HeadTable(msgspec.Struct):
    target_ids: list[int]


def match_vocabularies(target: Artifact, draft: Artifact) -> DraftVocabulary | None:
    """What turns the one's token ids into the other's; None where they are the same.

    Raises `ArtifactError`, which names both, where their tokenizers differ.
    """
    if target.manifest.files.get("tokenizer.json") != draft.manifest.files.get("tokenizer.json"):
        _compare(target, draft)
    path = draft.optional_file(DRAFT_VOCABULARY)
    width = target.manifest.model.vocab_size
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        target_ids, unknown = content["target_ids"], content["unknown"]
        if not 0 <= min(target_ids) <= max(target_ids) < width or not 0 <= unknown < len(target_ids):
            raise ValueError(f"ids outside of 0..{width - 1}")
        if len(target_ids) != draft.manifest.model.vocab_size:
            raise ValueError(f"{len(target_ids)} ids for {draft.manifest.model.vocab_size} logits")
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: no table of a draft's vocabulary for {target.manifest.name} ({error})") from None
    return DraftVocabulary.of(target_ids, unknown, width)


def _compare(target: Artifact, draft: Artifact) -> None:
    ours, theirs = Tokenizer.load(target.path).vocabulary, Tokenizer.load(draft.path).vocabulary
    if ours == theirs:
        return
    names = f"{draft.manifest.name} ({len(theirs)} tokens) cannot draft for {target.manifest.name} ({len(ours)} tokens)"
    for token, token_id in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != token_id:
            where = f"has the id {theirs[token]}" if token in theirs else "is missing"
            raise ArtifactError(
                f"{names}: their vocabularies differ. The first difference: token {token!r}, {token_id} in the "
                f"target, {where} in the draft. A draft must have the target's tokenizer"
            )
    raise ArtifactError(f"{names}: the draft's vocabulary has {len(theirs) - len(ours)} tokens more")
