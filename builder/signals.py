"""Signals that wait: a library's C++ initializers abort the process when a signal handler raises inside them."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_signals() -> Iterator[None]:
    """SIGINT and SIGTERM that come inside are delivered at its end. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {number: signal.signal(number, lambda n, frame: came.append(n)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])


def load_torch() -> None:
    """Import PyTorch and transformers' model classes, which takes seconds and runs initializers, with signals held."""
    with held_signals():
        for module in ("torch", "torch.onnx", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
            importlib.import_module(module)
