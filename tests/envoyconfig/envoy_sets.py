"""Configurations of every kind, and what Envoy is given for them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from extproc.config import Config
from extproc.envoyconfig.files import write_all
from extproc.envoyconfig.shapes import Json
from extproc.rundir import RunDir

CERTIFICATES = Path(__file__).parent.parent / "data" / "tls"
CA, PAIR = str(CERTIFICATES / "authority.pem"), str(CERTIFICATES / "engine.pem")
KEY = "sk-do-not-leak-Äß"
KEY_NAME = "INFERACT_TEST_ENGINE_KEY"


def node(node_id: str = "a", endpoint: str = "http://10.0.0.1:8000", **more: Any) -> Json:
    """A node as the configuration file has it."""
    hardware = {"hardware": "a100-80g", "backend": "vllm", "models": ["m"]}
    return {"id": node_id, "endpoint": endpoint, **hardware, **more}


SETS: dict[str, Json] = {
    "plain http": {"nodes": [node()]},
    "several nodes with weights": {
        "nodes": [node("a", weight=0.3), node("b", weight=1e-9), node("c", weight=0.0)],
    },
    "weights of 0 only": {"nodes": [node("a", weight=0.0), node("b", weight=0.0)]},
    "https that the system trusts": {"nodes": [node(endpoint="https://engine.example.com")]},
    "https with a name and an authority of its own": {
        "nodes": [node(endpoint="https://10.0.0.1:8443", tls={"sni": "engine.test", "ca_file": CA})]
    },
    "https with a client certificate": {
        "nodes": [
            node(endpoint="https://engine.test", tls={"ca_file": CA, "cert_file": PAIR, "key_file": PAIR})
        ]
    },
    "https to an address": {
        "nodes": [node("a", "https://10.0.0.1"), node("b", "https://[2001:db8::1]:8443")]
    },
    "names to resolve": {
        "nodes": [node("a", "http://engine-1.internal:8000"), node("b", "http://localhost")]
    },
    "IPv6": {"nodes": [node("a", "http://[2001:db8::1]:8000"), node("b", "http://[::1]")]},
    "base paths": {"nodes": [node("a", "http://10.0.0.1/engine-a/v2"), node("b", "http://10.0.0.2")]},
    "odd base paths": {"nodes": [node("a", "http://10.0.0.1/~x/%22..%0a@:+=,-._%25")]},
    "API keys": {"nodes": [node("a", api_key_env=KEY_NAME), node("b")]},
    "API key, base path and TLS": {
        "nodes": [node(endpoint="https://engine.test/base", api_key_env=KEY_NAME, tls={"ca_file": CA})]
    },
    "aliases": {"nodes": [node("a", model_aliases={"gpt": "m"}), node("b", models=["gpt", "m"])]},
    "64 nodes and 4 models": {
        "nodes": [
            node(f"node-{number}", f"http://10.0.0.{number}:8000", models=["m", "k", "l", "n"])
            for number in range(64)
        ]
    },
    "odd ids": {
        "nodes": [
            node(node_id) for node_id in ("-", "_._", "...", "0", "a-b_c.d", "A" * 64, "inferact", "null")
        ]
    },
    "odd model names": {
        "nodes": [
            node(
                models=[
                    'a "quoted" one',
                    "back\\slash \\n \\",
                    "ünïcödé \N{SNOWMAN} \N{GRINNING FACE}",
                    "]] .. os.exit() -- '",
                    "%UPSTREAM_CLUSTER% %%",
                    "{{ x }} ${y} #z",
                    "x" * 512,
                    "*",
                    "true",
                ]
            )
        ]
    },
    "a service on another machine": {
        "scheduler": {
            "extproc_listen": "10.0.0.9:9002",
            "extproc_tls": {"ca_file": CA, "cert_file": PAIR, "key_file": PAIR, "sni": "engine.test"},
            "admin_host": "10.0.0.9",
        },
        "nodes": [node()],
    },
    "a service on a local port": {"scheduler": {"extproc_listen": "[::1]:9002"}, "nodes": [node()]},
    "limits of the scheduler": {
        "scheduler": {
            "host": "::",
            "port": 65535,
            "request_timeout_ms": 86_400_000,
            "max_body_bytes": 1,
            "admin_port": 1,
            "envoy_admin_port": 2,
        },
        "nodes": [node()],
    },
    "the smallest timeout": {"scheduler": {"request_timeout_ms": 1}, "nodes": [node()]},
}


def made(folder: Path, data: Json | str) -> tuple[Config, RunDir]:
    """A configuration (or the name of one) that runs in the folder."""
    data = SETS[data] if isinstance(data, str) else data
    scheduler = {**data.get("scheduler", {}), "run_dir": str(folder)}
    config = Config.model_validate({**data, "scheduler": scheduler})
    return config, RunDir(config.scheduler.run_dir)


def written(folder: Path, data: Json | str, drained: frozenset[str] = frozenset()) -> RunDir:
    """The files of a configuration."""
    config, run = made(folder, data)
    write_all(config, run, drained)
    return run


def objects(value: object) -> Iterator[Json]:
    """Every JSON object in a resource."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from objects(each)


def resources(path: Path) -> list[Json]:
    """The resources of an xDS file."""
    discovery = json.loads(path.read_text())
    assert set(discovery) in ({"version_info", "resources"}, {"resources"})  # keys have no version
    return list(discovery["resources"])


def folded(run: RunDir) -> Json:
    """A bootstrap with clusters and routes in it: validation does not read them from their own files."""
    static: Json = yaml.safe_load(run.bootstrap.read_text())
    del static["dynamic_resources"]
    plain = [
        [{key: value for key, value in each.items() if key != "@type"} for each in resources(path)]
        for path in (run.clusters, run.routes)
    ]
    static["static_resources"]["clusters"] += plain[0]
    manager = manager_of(static)
    del manager["rds"]
    (manager["route_config"],) = plain[1]
    return static


def manager_of(start: Json) -> Json:
    """The HTTP connection manager of a bootstrap."""
    (listener,) = start["static_resources"]["listeners"]
    (manager,) = listener["filter_chains"][0]["filters"]
    config: Json = manager["typed_config"]
    return config


def lua_scripts(resource: object) -> list[str]:
    """Every script in a resource."""
    sources = (each["default_source_code"] for each in objects(resource) if "default_source_code" in each)
    return [source["inline_string"] for source in sources]
