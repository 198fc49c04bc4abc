"""OpenVINO GenAI's ContinuousBatchingPipeline as a bench worker. Runs in the peer's own environment: no plancast here.

One JSON line in: {"prompts": [[ids]], "max_tokens": n}; one out: {"seconds": s, "outputs": [[ids]]}.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    config = json.loads(sys.argv[1])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.max_num_batched_tokens = config["max_num_batched_tokens"]
    scheduler.max_num_seqs = config["max_num_seqs"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": config["threads"], "ENABLE_CPU_PINNING": False, **config["properties"]}
    lookup = config.get("prompt_lookup")
    if lookup:
        properties["prompt_lookup"] = True
    pipeline = genai.ContinuousBatchingPipeline(config["model"], scheduler, "CPU", properties)
    print(json.dumps({"ready": True, "version": genai.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        generation = genai.GenerationConfig()
        generation.max_new_tokens = job["max_tokens"]
        generation.ignore_eos = True
        generation.do_sample = False
        if lookup:
            generation.num_assistant_tokens, generation.max_ngram_size = lookup["tokens"], lookup["ngram"]
        prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in job["prompts"]]
        start = time.perf_counter()
        # With dynamic_split_fuse the pipeline does not heed max_num_seqs: it would run all prompts side by side.
        at_once = len(prompts) if config["max_num_seqs"] > 1 else 1
        results = [
            result
            for first in range(0, len(prompts), at_once)
            for result in pipeline.generate(prompts[first : first + at_once], [generation] * at_once)
        ]
        seconds = time.perf_counter() - start
        outputs = [list(map(int, result.m_generation_ids[0])) for result in results]
        print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
