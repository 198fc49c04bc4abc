"""plancast as a bench worker: the same protocol as the peers (see `worker_genai.py`)."""

from __future__ import annotations

import json
import sys
import time

from runtime.llm import LLM
from runtime.sampling_params import SamplingParams
from runtime.version import __version__


def main() -> None:
    config = json.loads(sys.argv[1])
    llm = LLM(
        config["artifact"],
        num_threads=config["threads"],
        kv_cache_memory=config.get("kv_cache_memory", 1 << 30),
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        enable_prefix_caching=False,
        speculative_config=config.get("speculative_config"),
    )
    print(json.dumps({"ready": True, "version": __version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        results = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        outputs = [list(result.outputs[0].token_ids) for result in results]
        print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
