"""Everyday questions, put together of ways to ask and things to ask about (`questions.yaml`)."""

from __future__ import annotations

from importlib import resources

import numpy as np


def everyday_questions(seed: int) -> list[str]:
    """Each once, in an order that `seed` decides."""
    import yaml

    kinds = yaml.safe_load(resources.files("builder.drafts").joinpath("questions.yaml").read_text(encoding="utf-8"))
    questions = [way.format(thing) for kind in kinds for way in kind["ask"] for thing in kind["about"]]
    return [questions[index] for index in np.random.default_rng(seed).permutation(len(questions))]
