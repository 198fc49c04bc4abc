"""What executors check of an engine against its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import ArtifactError
from runtime.manifest import rebuild_hint

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.kv_layout import KvLayout


def check_block(artifact: Artifact, layout: KvLayout, block_bytes: int) -> None:
    """Raise `ArtifactError` unless the engine's cache is what the manifest tells the block pool."""
    if block_bytes != layout.bytes_per_block:
        raise ArtifactError(
            f"{artifact.path}: a KV block has {block_bytes} bytes in the engine and {layout.bytes_per_block} in "
            f"the manifest; {rebuild_hint(artifact.manifest.name)}"
        )


def vocabulary(artifact: Artifact, width: int) -> int:
    """How many tokens an engine whose output has `width` columns says.

    Raises:
        ArtifactError: it embeds, and its hidden states are not as wide as the manifest has it.
    """
    manifest = artifact.manifest
    if manifest.embedding is None:
        return width
    if width != manifest.embedding.size:
        raise ArtifactError(
            f"{artifact.path}: a hidden state has {width} entries in the engine and {manifest.embedding.size} in "
            f"the manifest; {rebuild_hint(manifest.name)}"
        )
    return manifest.model.vocab_size
