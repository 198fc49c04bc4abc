"""transformers' `generate` as a bench worker (the build extra's environment). Protocol: see `worker_genai.py`."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    config = json.loads(sys.argv[1])
    import torch
    import transformers

    torch.set_num_threads(config["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.bfloat16).eval()
    print(json.dumps({"ready": True, "version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        length = max(map(len, job["prompts"]))
        ids = torch.zeros((len(job["prompts"]), length), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(job["prompts"]):  # padded on the left, as generate wants it
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        start = time.perf_counter()
        with torch.inference_mode():
            outputs = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=job["max_tokens"],
                min_new_tokens=job["max_tokens"],
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "outputs": outputs[:, length:].tolist()}), flush=True)


if __name__ == "__main__":
    main()
