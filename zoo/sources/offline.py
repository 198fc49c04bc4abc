"""One switch for all sources: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) means that nothing is asked of the network."""

from __future__ import annotations

import os

_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_variable() -> str | None:
    """The variable that keeps us offline, or None where the network may be used."""
    return next((name for name in _VARIABLES if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}), None)
