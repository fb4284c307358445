"""vLLM's own load tool, `vllm bench serve`, of the vLLM that `make test-engines` installs; none may fail."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main  # the command itself wants a package named `vllm`

url, model, tokenizer = (os.environ[name] for name in ("BASE_URL", "MODEL", "TOKENIZER"))
with tempfile.TemporaryDirectory() as folder:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args([
        "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions",
        "--model", model, "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "16",
        "--num-prompts", "100", "--request-rate", "10", "--save-result", "--result-dir", folder,
    ])  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        main(arguments)
    (result,) = (json.loads(path.read_text()) for path in Path(folder).glob("*.json"))
assert result["completed"] == 100 and not result.get("failed", 0), result
print(f"{result['completed']} requests succeeded, median TTFT {result['median_ttft_ms']:.0f} ms")
