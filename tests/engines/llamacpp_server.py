"""llama.cpp's own server, as a Python package carries it: `python llamacpp_server.py GGUF MODEL_NAME PORT`.

Runs with the engines' own Python, until it is killed.
"""

import signal
import sys

import xllamacpp

SLOTS = 4
CONTEXT_TOKENS = 2048


def main(gguf: str, name: str, port: int) -> None:
    """Serve a model under a name."""
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.model_alias = {name}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = CONTEXT_TOKENS * SLOTS
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(f"listens at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
