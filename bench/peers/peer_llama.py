"""llama.cpp's server, at the nearest of its own formats to the recipe's weights."""

from __future__ import annotations

import sys
import sysconfig
from typing import TYPE_CHECKING, Any

from bench.peers import llama_build
from bench.peers.environments import PeerEnvironment, run
from bench.peers.peer import Peer, Setting, models_folder

if TYPE_CHECKING:
    from builder.recipe import Recipe
    from zoo.progress import Progress

_FORMATS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}

# sentencepiece is what its converter imports besides the torch and transformers of the extra `build`.
ENVIRONMENT = PeerEnvironment(name="llama.cpp", installs=(("cmake", "ninja", "sentencepiece"),))


class LlamaCpp(Peer):
    name = "llama.cpp"
    script = "worker_llama.py"
    environment = ENVIRONMENT

    def precision(self, recipe: Recipe) -> str:
        return f"{_FORMATS.get(recipe.weights.dtype, 'Q8_0')} weights, f16 KV"

    def prepare(self, setting: Setting, progress: Progress) -> dict[str, Any]:
        llama_build.ensure_programs(ENVIRONMENT.folder, progress)
        wanted = _FORMATS.get(setting.recipe.weights.dtype, "Q8_0")
        model = models_folder() / f"{setting.checkpoint_key}-{wanted}.gguf"
        if not model.exists():
            base = models_folder() / f"{setting.checkpoint_key}-F32.gguf"
            if not base.exists():
                progress.update("converting to GGUF", 0, None)
                script = llama_build.source() / "convert_hf_to_gguf.py"
                part = base.with_suffix(".part")
                command = [sys.executable, str(script), str(setting.checkpoint), "--outtype", "f32"]
                own = sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT.folder)})
                run(
                    [*command, "--outfile", str(part)],
                    f"convert {setting.checkpoint} to GGUF",
                    environment={"PYTHONPATH": own},
                )
                part.rename(base)
            if wanted != "F32":
                progress.update(f"quantizing to {wanted}", 0, None)
                part = model.with_suffix(".part")
                quantize = str(llama_build.program("llama-quantize"))
                run([quantize, str(base), str(part), wanted], f"quantize {base.name} to {wanted}")
                part.rename(model)
        return {"model": str(model), "server": str(llama_build.program("llama-server")), "version": llama_build.VERSION}
