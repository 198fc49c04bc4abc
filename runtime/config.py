"""What the engine core is configured with: the artifact's limits, and how to schedule within them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime.errors import PlancastError
from runtime.manifest import Manifest, Pooling
from runtime.speculation.config import SpeculationConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in tokens unless a name says otherwise. Raises `PlancastError` on a bad value."""

    max_context_len: int  # prompt and output of one sequence
    max_num_seqs: int = 64  # sequences side by side
    max_num_batched_tokens: int = 512  # tokens a step
    eos_token_ids: tuple[int, ...] = ()

    num_blocks: int | None = None  # KV blocks; None: as many as the memory below holds
    kv_cache_memory: int | None = None  # bytes; None: the share below of the memory that is free
    kv_cache_memory_share: float = 0.4
    enable_prefix_caching: bool = True

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    batching: Literal["in_flight", "static"] = "in_flight"  # static: a batch runs to its end before the next (baseline)
    max_prefill_chunk: int | None = None  # tokens of one sequence a step; None: the whole budget
    max_num_waiting: int = 4096  # requests in the queue; one more is refused as overloaded
    queue_timeout: float | None = None  # waited longer for its first step: refused
    max_preemptions: int = 3  # after so many a request's worst case is reserved, and nothing preempts it
    starvation_turn: int = 8  # with priorities, one admission in so many goes to whoever waits longest
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    swap_cached_blocks: bool = False  # evicted prefix-cache blocks go to the swap file, and a hit brings them back
    swap_space: int = 1 << 30  # bytes of the swap file, where anything is swapped
    swap_folder: str | None = None  # None: the system's temporary folder
    ttft_slo: float | None = None
    tpot_slo: float | None = None  # prefill chunks are sized so that a step with decodes stays below it
    iteration_log: str | None = None  # JSONL file, one line a step
    speculation: SpeculationConfig = SpeculationConfig()
    pooling: Pooling | None = None  # the engine gives hidden states, pooled so; None: it gives logits

    def __post_init__(self) -> None:
        for name in ("max_context_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "starvation_turn"):
            self._at_least(name, 1)
        self._at_least("max_preemptions", 0)
        for name in ("num_blocks", "max_prefill_chunk", "kv_cache_memory", "swap_space"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        for name in ("queue_timeout", "ttft_slo", "tpot_slo"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlancastError(f"{name} is {value}: give a time above 0 seconds, or leave it out")
        if not 0 < self.kv_cache_memory_share <= 1:
            raise PlancastError(f"kv_cache_memory_share is {self.kv_cache_memory_share}: give a share in (0, 1]")
        for name, allowed in (
            ("scheduling_policy", ("fcfs", "priority")),
            ("batching", ("in_flight", "static")),
            ("preemption_mode", ("recompute", "swap")),
        ):
            if getattr(self, name) not in allowed:
                raise PlancastError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if self.pooling is not None and self.speculation.is_on:
            raise PlancastError("speculation drafts what an engine generates, and this one embeds: turn it off")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise PlancastError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                f"a step must hold one token of each sequence. Raise the one or lower the other"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlancastError(f"{name} is {value!r}: give a whole number of at least {least}")

    @classmethod
    def from_manifest(cls, manifest: Manifest, **overrides: Any) -> EngineConfig:
        """The artifact's limits and defaults, with `overrides` on top (None keeps the artifact's value).

        Raises:
            PlancastError: an override is unknown, or asks for more context than the artifact was built for.
        """
        unknown = sorted(set(overrides) - set(cls.__struct_fields__))
        if unknown:
            raise PlancastError(
                f"unknown engine option {', '.join(unknown)}: known ones are {', '.join(cls.__struct_fields__)}"
            )
        limits, defaults = manifest.limits, manifest.defaults
        values: dict[str, Any] = {
            "max_context_len": limits.max_context_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "eos_token_ids": tuple(manifest.model.eos_token_ids),
            "kv_cache_memory": defaults.kv_cache_memory,
            "kv_cache_memory_share": defaults.kv_cache_memory_share,
            "enable_prefix_caching": defaults.enable_prefix_caching,
            "scheduling_policy": defaults.scheduling_policy,
            "ttft_slo": defaults.ttft_slo,
            "tpot_slo": defaults.tpot_slo,
            "speculation": defaults.speculation,
            "pooling": manifest.embedding.pooling if manifest.embedding is not None else None,
        }
        values.update({name: value for name, value in overrides.items() if value is not None})
        if values["max_context_len"] > limits.max_context_len:
            raise PlancastError(
                f"max_context_len {values['max_context_len']} is more than the artifact was built for "
                f"({limits.max_context_len}): lower it, or rebuild with limits.max_context_len raised"
            )
        return cls(**values)
