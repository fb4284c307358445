"""Two real vLLM that hand over KV by NIXL, behind Envoy: one prefills, one decodes."""

import json
from dataclasses import dataclass
from pathlib import Path

import httpx
from engine_processes import MODEL, EngineProcess, vllm
from envoy_stack import Stack, free_ports

LIMIT_S = 180.0
"""On two cores, the first time that the engines speak to each other takes half a minute."""
_CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


@dataclass
class Pair:
    """Both engines, and the router in front of them."""

    prefill: EngineProcess
    decode: EngineProcess
    stack: Stack

    async def ask(self, url: str, prompt: str) -> str:
        """The answer to a prompt, without chance, from the router or from an engine itself."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


def nixl_vllm(name: str, folder: Path) -> EngineProcess:
    """A vLLM that can be either."""
    engine = vllm(name, folder)
    (side_channel,) = free_ports(1)
    engine.command += ["--kv-transfer-config", json.dumps(_CONNECTOR)]
    engine.environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        "UCX_TLS": "sm,tcp,self",
    }
    del engine.node["kv_events"]
    return engine
