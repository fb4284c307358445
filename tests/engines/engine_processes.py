"""Real engines as processes: vLLM and llama.cpp's server."""

import asyncio
import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engines_setup import gguf, model_dir, python
from envoy_stack import free_ports
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny"
GGUF_MODEL = "gemma3-270m"
BLOCK_TOKENS = 32
BLOCKS = 1536
"""KV blocks of each of the two."""
CONTEXT_TOKENS = 8192
MOST_RUNNING, MOST_QUEUED = 8, 16
"""Requests that one vLLM runs, and those that wait in it before it refuses more."""
START_LIMIT_S = 300.0

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(slots=True)
class EngineProcess:
    """An engine, and how it is asked about itself. `node`: more members of its entry in a configuration."""

    name: str
    command: list[str]
    port: int
    log: Path
    node: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin; `ready` waits until it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | _QUIET | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Return once it serves."""
        async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self.process is not None and self.process.poll() is None, self.log.read_text()[-4000:]
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health", timeout=5)).status_code == 200:
                        return
                await asyncio.sleep(0.25)

    def kill(self) -> None:
        """End all its processes at once, as a power cut would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def kill_core(self) -> None:
        """End the process that computes, as a crash or the kernel's out-of-memory killer would."""
        assert self.process is not None
        listing = ("ps", "-o", "pid=,args=", "--ppid", str(self.process.pid))
        for line in subprocess.check_output(listing, text=True).splitlines():
            pid, _, command = line.strip().partition(" ")
            if "EngineCor" in command:
                os.kill(int(pid), signal.SIGKILL)
                return
        raise AssertionError("no process computes")

    async def metric(self, name: str) -> float:
        """What it says of itself: the sum of a metric over its label sets."""
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = [sample.value for sample in samples if sample.name == name]
        assert found, f"{self.name} has no metric {name}"
        return sum(found)


@dataclass(slots=True)
class Engines:
    """`a` and `b` share the traffic; `whole` has as large a cache as both; `gguf` is llama.cpp's."""

    a: EngineProcess
    b: EngineProcess
    whole: EngineProcess
    gguf: EngineProcess

    @property
    def all(self) -> tuple[EngineProcess, ...]:
        """Every one."""
        return self.a, self.b, self.whole, self.gguf

    def of(self, node_id: str) -> EngineProcess:
        """The engine of a node."""
        return next(engine for engine in self.all if engine.name == node_id)


def vllm(name: str, folder: Path, blocks: int = BLOCKS) -> EngineProcess:
    """A vLLM that publishes KV events and tells cached tokens."""
    port, feed, replay = free_ports(3)
    # With the name of a host in place of `*`, it would connect there instead of listening.
    events = (
        '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv@tiny",'
        f'"endpoint":"tcp://*:{feed}","replay_endpoint":"tcp://127.0.0.1:{replay}"}}'
    )
    options = {
        "--model": model_dir(),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "bfloat16",
        "--max-model-len": CONTEXT_TOKENS,
        "--max-num-seqs": MOST_RUNNING,
        "--max-num-queued-reqs": MOST_QUEUED,
        "--block-size": BLOCK_TOKENS,
        "--num-gpu-blocks-override": blocks,
        "--kv-events-config": events,
    }
    command = [str(python()), "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(word) for option in options.items() for word in option]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    kv_events = {
        "endpoint": f"tcp://127.0.0.1:{feed}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        "topic": "kv@",
    }
    node = {"backend": "vllm", "models": [MODEL], "kv_events": kv_events}
    return EngineProcess(name, command, port, folder / f"{name}.log", node)


def llamacpp(name: str, folder: Path) -> EngineProcess:
    """A llama.cpp server with a model that knows some English."""
    (port,) = free_ports(1)
    server = Path(__file__).with_name("llamacpp_server.py")
    command = [str(python()), str(server), str(gguf()), GGUF_MODEL, str(port)]
    node = {"backend": "llamacpp", "models": [GGUF_MODEL]}
    return EngineProcess(name, command, port, folder / f"{name}.log", node)
