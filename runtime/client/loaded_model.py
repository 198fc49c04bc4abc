"""What `LLM` and `AsyncLLM` tell alike of the model that they have loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.client.frontend import Frontend
from runtime.messages import Ready
from runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from runtime.chat_template import ChatTemplate
    from runtime.manifest import Manifest
    from runtime.tokenizer import Tokenizer


class LoadedModel:
    """Base of the two; its subclasses set `_frontend`."""

    _frontend: Frontend[Any]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._frontend.chat_template

    @property
    def manifest(self) -> Manifest:
        return self._frontend.manifest

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._frontend.max_context_len

    @property
    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json; {} where it has none."""
        return self._frontend.generation_config

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's generation config sets, with `changes` on top."""
        return self._frontend.default_sampling_params(**changes)

    @property
    def ready(self) -> Ready:
        """What the engine said when it had loaded: process id, KV blocks, load time."""
        return self._frontend.engine.ready
