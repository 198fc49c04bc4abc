"""plancast: cast a Hugging Face model into a compiled engine, and serve it.

The front door: the command line (`plancast --help`) and what `import plancast` offers.

    import plancast

    with plancast.LLM("artifacts/smollm2-135m-cpu") as llm:
        for result in llm.generate(["The capital of France is"], plancast.SamplingParams(temperature=0)):
            print(result.outputs[0].text)
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from runtime.version import __version__

# What `import plancast` offers, and where it lives. Loaded on first use: importing plancast costs nothing.
_EXPORTS = {
    "LLM": "runtime.llm",
    "AsyncLLM": "runtime.async_llm",
    "SamplingParams": "runtime.sampling_params",
    "RequestOutput": "runtime.outputs",
    "CompletionOutput": "runtime.outputs",
    "Artifact": "runtime.artifact",
    "PlancastError": "runtime.errors",
    "Recipe": "builder.recipe",
    "load_recipe": "builder.recipe",
    "build": "builder.build",
}

# Each room brings its own commands.
_COMMANDS = (
    "builder.cli",
    "builder.recipe_cli",
    "builder.capacity_cli",
    "builder.draft_cli",
    "zoo.cli",
    "runtime.cli",
    "runtime.serve_cli",
    "runtime.trace_cli",
    "bench.cli",
)

if TYPE_CHECKING:
    from builder.build import build
    from builder.recipe import Recipe, load_recipe
    from runtime.artifact import Artifact
    from runtime.async_llm import AsyncLLM
    from runtime.errors import PlancastError
    from runtime.llm import LLM
    from runtime.outputs import CompletionOutput, RequestOutput
    from runtime.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "Artifact",
    "AsyncLLM",
    "CompletionOutput",
    "PlancastError",
    "Recipe",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "build",
    "load_recipe",
    "main",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'plancast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])


def _make_app() -> Any:
    import typer

    app = typer.Typer(
        name="plancast",
        help="Cast a Hugging Face model into a compiled engine, and serve it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def print_version(value: bool) -> None:
        if value:
            print(f"plancast {__version__}")
            raise typer.Exit

    @app.callback()
    def front_door(
        version: bool = typer.Option(False, "--version", callback=print_version, is_eager=True, help="Print it, exit."),
    ) -> None:
        pass

    for module in _COMMANDS:
        importlib.import_module(module).register(app)
    return app


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and its exit code, never a traceback."""
    from runtime.errors import PlancastError

    try:
        _make_app()()
    except PlancastError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`plancast ... | head`): nothing to say, and nothing more to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    main()
