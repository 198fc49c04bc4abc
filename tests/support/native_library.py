"""The native library for tests that need it."""

from __future__ import annotations

import pytest

from plugins.native import NativeBuildError, build_native


def require_native() -> None:
    """Build the library, or skip the module that calls this at its import, with the reason."""
    try:
        build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}", allow_module_level=True)
