# /// script
# requires-python = ">=3.11"
# dependencies = ["guidellm==0.8.1"]
# ///
"""GuideLLM, a load tool: ten seconds of streams at a constant rate; none may fail."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = (os.environ[name] for name in ("BASE_URL", "MODEL", "TOKENIZER"))
with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        sys.executable, "-m", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model={model}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--profile", "kind=constant,rate=5",
        "--constraint", "kind=max_duration,seconds=10",
        "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
assert totals["successful"] > 0 and not totals["errored"], totals
print(f"{totals['successful']} requests succeeded, {totals['errored']} failed")
