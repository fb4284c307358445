"""Configuration files to test with, and loading them from a folder."""

from pathlib import Path
from typing import Any

import pytest

from extproc.config import Config, ConfigError, NodeConfig, Problem, load_config

NODE = """\
nodes:
  - id: n1
    hardware: a100-80g
    backend: vllm
    endpoint: http://10.0.0.1:8000
    models: [m]
"""

REFERENCE = """\
scheduler:
  port: 9000               # int, default 9000
  host: "0.0.0.0"         # string, default "0.0.0.0"
  log_level: info          # debug | info | warn | error
  request_timeout_ms: 30000

nodes:
  - id: node-a100-01
    hardware: a100-80g
    backend: vllm
    endpoint: http://10.0.0.5:8000
    models: [meta-llama/Llama-3-8B-Instruct]
    weight: 0.5
  - id: my-node
    hardware: custom
    hardware_profile:
      memory_bandwidth_gbps: 900
      vram_gb: 48
      nvlink: false
    backend: tgi
    endpoint: https://tgi.example.org
    models:
      - other

kv_cache:
  policy: adaptive         # lru | prefix-aware | adaptive
  pin_system_prompts: false # default true
  eviction_threshold_pct: 75

batching:
  strategy: static
  max_batch_size: 16
  prefill_decode_split: true
"""


def load(folder: Path, text: str, **options: Any) -> Config:
    path = folder / "inferact.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, **options)


def problems(folder: Path, text: str, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **options)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return caught.value.problems


def only_node(folder: Path, *lines: str) -> NodeConfig:
    return load(folder, node(*lines)).nodes[0]


def node(*lines: str) -> str:
    """A file with one node, whose keys the given lines add or replace."""
    kept = NODE.splitlines()
    for line in lines:
        key = line.split(":")[0]
        kept = [old for old in kept if not old.strip().removeprefix("- ").startswith(f"{key}:")]
        kept.append(f"    {line}")
    kept[1] = "  - " + kept[1].strip().removeprefix("- ")
    return "\n".join(kept) + "\n"


def scheduler(*lines: str) -> str:
    return "scheduler:\n" + "".join(f"  {line}\n" for line in lines) + NODE


def marked_line(text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if "# here" in line)
