"""What a grammar costs llama.cpp's server, as `core.lab.grammar_peers` asks it: the same protocol as `grammar_vllm.py`.

`LLAMA_SERVER` is the binary. The server runs on loopback for as long as this does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def body_of(job: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    body = {"prompt": job["prompts"][seed], "temperature": 1.0, "seed": seed, "cache_prompt": False}
    if kind == "plain":
        return {**body, "n_predict": job["num_tokens"], "ignore_eos": True}
    if kind == "constrained":
        return {**body, "n_predict": job["num_tokens"], "json_schema": job["schema"]}
    return {**body, "n_predict": job["heavy_tokens"], "json_schema": job["heavy"]}


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def seconds_per_token(address: str, job: dict[str, Any], kind: str) -> float:
    bodies = [body_of(job, kind, seed) for seed in range(len(job["prompts"]))]
    with ThreadPoolExecutor(len(bodies)) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda body: ask(address, "/completion", body), bodies))
        took = time.perf_counter() - started
    return took / max(answer["tokens_predicted"] for answer in answers)


def wait_ready(address: str) -> None:
    for _ in range(300):
        try:
            ask(address, "/health")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("llama-server was not ready within a minute")


def main() -> None:
    job = json.load(sys.stdin)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num = len(job["prompts"])
    command = [os.environ["LLAMA_SERVER"], "-m", job["gguf"], "-np", str(num), "-c", str(2048 * num), "-t", "2"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    times: dict[str, list[float]] = {"plain": [], "constrained": [], "heavy": []}
    try:
        wait_ready(address)
        for number in range(job["rounds"] + 1):
            for kind, taken in times.items():
                took = seconds_per_token(address, job, kind)
                if number:
                    taken.append(took)
    finally:
        server.terminate()
        server.wait(30)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
