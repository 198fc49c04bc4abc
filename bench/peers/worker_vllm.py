"""vLLM as a bench worker. Runs in the peer's own environment: no plancast here. Protocol: see `worker_genai.py`."""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    config = json.loads(sys.argv[1])
    _preload_openmp()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(str(core) for core in range(config["threads"])))
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.fdopen(os.dup(1), "w")  # vLLM and its children print to stdout: answers go past it
    os.dup2(2, 1)
    import vllm

    llm = vllm.LLM(
        config["model"],
        dtype="bfloat16",
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=max(config["max_num_batched_tokens"], config["max_model_len"]),
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": True, "version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [list(map(int, result.outputs[0].token_ids)) for result in results]
        print(json.dumps({"seconds": seconds, "outputs": outputs}), file=answers, flush=True)


def _preload_openmp() -> None:
    """Start over with Intel's OpenMP ahead of torch's, as vLLM's guide for CPUs asks for; it comes with vllm-cpu."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and str(library) not in os.environ.get("LD_PRELOAD", ""):
        preload = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": preload})


if __name__ == "__main__":
    main()
