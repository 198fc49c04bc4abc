"""OpenVINO GenAI's ContinuousBatchingPipeline: the same backend as ours, so the same precision can be asked for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from bench.peers.environments import PeerEnvironment, run
from bench.peers.peer import Peer, Setting, models_folder

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.progress import Progress

_WEIGHTS = {"f32": "fp32", "bf16": "fp32", "f16": "fp16", "int8": "int8", "int4": "int4"}
_TYPES = {"f32": "f32", "bf16": "bf16", "f16": "f16", "int8": "u8"}


# torchvision from the index does not import beside a CPU build of torch, and optimum does not need it here.
ENVIRONMENT = PeerEnvironment(
    name="openvino-genai",
    installs=(
        (
            "torch==2.13.0",
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers",
            "optimum-intel==2.2.0",
            "transformers<5.6",
            "nncf",
        ),
    ),
    remove=("torchvision",),
)


class OpenVinoGenAI(Peer):
    name = "openvino-genai"
    script = "worker_genai.py"
    environment = ENVIRONMENT

    def precision(self, recipe: Recipe) -> str:
        kv = _TYPES.get(recipe.kv.key, "u8")
        return f"{recipe.weights.dtype} weights, {recipe.backend.compute} arithmetic, {kv} KV"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        recipe = setting.recipe
        weights = _WEIGHTS.get(recipe.weights.dtype, "int8")
        groups: tuple[str, ...] = ()
        if weights == "int4":  # its default of 128 does not divide every width; the recipe's do
            groups = ("--group-size", str(recipe.weights.group_size or -1))
        target = models_folder() / "-".join([setting.checkpoint_key, "openvino", weights, *groups[1:]])
        if not target.exists():
            progress.update(f"exporting with {weights} weights", 0, None)
            part = target.with_name(f"{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            command = [
                str(ENVIRONMENT.folder / "bin" / "optimum-cli"),
                *("export", "openvino", "--model", str(setting.checkpoint), "--task", "text-generation-with-past"),
                *("--weight-format", weights, *groups, str(part)),
            ]
            run(command, f"export {setting.checkpoint} for OpenVINO GenAI")
            part.rename(target)
        return {"model": str(target), "properties": self.properties(recipe)}

    def properties(self, recipe: Recipe) -> dict[str, Any]:
        """What is set besides the threads, so that it computes as the recipe does."""
        return {
            "INFERENCE_PRECISION_HINT": _TYPES[recipe.backend.compute],
            "KV_CACHE_PRECISION": _TYPES.get(recipe.kv.key, "u8"),
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": recipe.backend.dynamic_quantization_group_size,
        }


class OpenVinoGenAIDefaults(OpenVinoGenAI):
    """As it comes: on a CPU with the units for it bf16 arithmetic, activations in int8 groups, an 8-bit KV cache."""

    name = "openvino-genai-defaults"

    def precision(self, recipe: Recipe) -> str:
        return f"{_WEIGHTS.get(recipe.weights.dtype, 'int8')} weights, all else by its defaults"

    def properties(self, recipe: Recipe) -> dict[str, Any]:
        return {}
