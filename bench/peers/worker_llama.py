"""llama.cpp's server as a bench worker: starts it and posts token ids. Protocol: see `worker_genai.py`.

Standard library only. Each request has a slot and a connection of its own, as a client of the server would.
"""

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat


def main() -> None:
    config = json.loads(sys.argv[1])
    slots = config["max_num_seqs"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [config["server"], "--model", config["model"], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(config["threads"]), "--threads-batch", str(config["threads"])]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * config["max_model_len"])]
    command += ["--batch-size", "2048", "--ubatch-size", "512", "--cont-batching", "--no-webui"]
    command += ["--cache-ram", "0"]  # no prompt is kept for later ones: no other engine here does
    command += config.get("arguments", [])
    server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    try:
        while not _healthy(port):
            if server.poll() is not None:
                raise SystemExit(f"llama-server ended with code {server.returncode} before it was ready")
            time.sleep(0.2)
        print(json.dumps({"ready": True, "version": config["version"]}), flush=True)
        with ThreadPoolExecutor(slots) as pool:
            for line in sys.stdin:
                job = json.loads(line)
                start = time.perf_counter()
                outputs = list(pool.map(_complete, repeat(port), job["prompts"], repeat(job["max_tokens"])))
                seconds = time.perf_counter() - start
                print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)
    finally:
        server.terminate()
        server.wait()


def _healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _complete(port: int, ids: list, max_tokens: int) -> list:
    body = {
        "prompt": ids,
        "n_predict": max_tokens,
        "samplers": ["top_k"],  # greedy, and the quickest way there
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"llama-server answered {response.status}: {answer}")
    return answer["tokens"]


if __name__ == "__main__":
    main()
