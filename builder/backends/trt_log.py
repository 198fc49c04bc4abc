"""What TensorRT and TensorRT-RTX say while they build."""

from __future__ import annotations

from typing import Any


class Log:
    """A logger of either, quiet; keeps the last error to explain a failure with."""

    def __init__(self, trt: Any):
        self.last = "no reason given"
        keep = self

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    keep.last = message.strip()

        self.logger = Logger()
