"""The errors that people see.

Every error of ours says what is wrong, the value, the limit, and what to do. The command line prints one as a single
line and exits with `exit_code`; the server turns one into an HTTP status. Nothing else may reach a person.
"""

from __future__ import annotations


class PlancastError(Exception):
    """Base of every error that is meant to be read by a person."""

    exit_code = 2


class RecipeError(PlancastError):
    """A recipe is malformed, or asks for an impossible combination."""


class ZooError(PlancastError):
    """A model cannot be found, fetched, trusted or read."""


class BuildError(PlancastError):
    """A build cannot start or cannot go on (memory, disk, unsupported graph, quality bound)."""


class ArtifactError(PlancastError):
    """An artifact is damaged, incomplete, or made for another version or machine."""


class RequestError(PlancastError, ValueError):
    """A request is invalid. `param` names the offending field (HTTP 400)."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class OverloadedError(PlancastError):
    """The engine's queue is full (HTTP 429). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueTimeoutError(PlancastError):
    """A request waited longer than the queue timeout (HTTP 503)."""


class GenerationError(PlancastError):
    """The engine computed something that no token can come from: not the request's fault (HTTP 500)."""

    exit_code = 3


class EngineDeadError(PlancastError):
    """The engine process died and cannot be restarted (HTTP 503)."""

    exit_code = 3
