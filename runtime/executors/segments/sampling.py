"""The kernels that sample, as the artifact names them, and their launches."""

from __future__ import annotations

from runtime.executor import RowSampling
from runtime.executors.sampling_blocks import MAX_TOP_LOGPROBS, SAMPLE, SCORE, VERIFY, Block, launches, told_block
from runtime.executors.segments.calls import Call
from runtime.executors.segments.plan import SegmentPlan
from runtime.sampling.narrow import MAX_CANDIDATES


def samples(plan: SegmentPlan) -> bool:
    """Whether the artifact has kernels that choose among as many candidates as the host's sampler does."""
    kernels = plan.kernels
    return plan.sample in kernels and plan.score in kernels and kernels[plan.sample].constants["MOST"] == MAX_CANDIDATES


def verifies(plan: SegmentPlan) -> bool:
    """Whether it also has the kernel for drafts that were drawn at random."""
    return samples(plan) and plan.verify in plan.kernels


def sampling_calls(
    plan: SegmentPlan, sampling: RowSampling, block: Block, logits: int, given: int, told: int, vocab_size: int
) -> list[Call]:
    """The launches, with logits, what went up (`block`), and what will come down at these addresses."""
    addresses = block.addresses(given) | told_block(len(sampling.temperatures)).addresses(told)
    addresses |= {"logits": logits, "size": vocab_size, "width": MAX_TOP_LOGPROBS}
    names = {SAMPLE: plan.sample, VERIFY: plan.verify, SCORE: plan.score}
    calls = []
    for kind, programs in launches(sampling):
        name = names[kind]
        assert name is not None
        parameters = plan.kernels[name].parameters
        calls.append(Call(name, (programs,), tuple(addresses[parameter] for parameter, _ in parameters)))
    return calls
