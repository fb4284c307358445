"""`/status`, `/metrics`, `/healthz`, `/readyz`: what anyone may read."""

import json
from typing import Any

import pytest
from admin_app import LLAMA, App
from prometheus_client.parser import text_string_to_metric_families

from extproc import __version__
from extproc.config import CachePolicy
from extproc.routing.loads import Work
from extproc.routing.node import REPORT_FRESH_S, EngineReport, Health
from extproc.routing.policy import Policy

REFERENCE = json.loads("""
{
  "scheduler_version": "0.9.4",
  "uptime_seconds": 3842,
  "nodes": [
    {
      "id": "node-a100-01",
      "hardware": "a100-80g",
      "backend": "vllm",
      "status": "healthy",
      "kv_cache_used_pct": 42.1,
      "requests_in_flight": 3,
      "requests_total": 1240,
      "p99_latency_ms": 820
    }
  ],
  "total_requests_routed": 4821
}
""")
NODE_ADDITIONS = [
    "drained", "models", "weight", "queue_depth", "prefix_hit_ratio", "knowledge_level", "last_error",
    "engine_running", "report_age_s", "role",
]  # fmt: skip


async def status(app: App) -> dict[str, Any]:
    response = await app.client.get("/status")
    assert response.status == 200
    assert response.content_type == "application/json"
    return dict(await response.json())


async def first_node(app: App) -> dict[str, Any]:
    return dict((await status(app))["nodes"][0])


async def test_the_keys_are_those_of_the_reference_in_its_order_then_ours(app: App) -> None:
    answer = await status(app)
    assert list(answer) == [*REFERENCE, "policy", "queue_depth", "config_errors"]
    for node in answer["nodes"]:
        assert list(node) == [*REFERENCE["nodes"][0], *NODE_ADDITIONS]


async def test_a_node_in_the_state_of_the_reference_is_told_as_there(app: App) -> None:
    node = app.nodes["node-a100-01"]
    node.health = Health.HEALTHY
    node.report = EngineReport(app.now_s, running=3, waiting=2, kv_used_ratio=0.42149)
    node.requests_total = 1240
    node.latencies_s.append(0.8199)
    for _ in range(3):
        app.context.router.book(node, Work(100.0, 10.0, 1.0), app.now_s)
    answer = await first_node(app)
    expected = REFERENCE["nodes"][0]
    assert {key: answer[key] for key in expected} == expected
    assert [type(answer[key]) for key in expected] == [type(value) for value in expected.values()]
    assert answer["knowledge_level"] == "metrics"


async def test_what_the_engine_reports_is_told_with_its_age_and_whoever_sent_it(app: App) -> None:
    app.nodes["node-a100-01"].report = EngineReport(app.now_s, running=3, waiting=2)
    app.now_s += 1.5
    answer = await first_node(app)
    assert (answer["engine_running"], answer["queue_depth"], answer["report_age_s"]) == (3, 2, 1.5)
    assert answer["requests_in_flight"] == 0


async def test_an_unknown_is_null_and_never_zero(app: App) -> None:
    answer = await first_node(app)
    unknown = ("kv_cache_used_pct", "p99_latency_ms", "queue_depth", "prefix_hit_ratio", "last_error")
    unknown += ("engine_running", "report_age_s")
    assert {key: answer[key] for key in unknown} == dict.fromkeys(unknown)
    assert answer["knowledge_level"] == "hardware"


async def test_a_known_zero_is_zero(app: App) -> None:
    node = app.nodes["node-a100-01"]
    node.report = EngineReport(app.now_s, running=0, waiting=0, kv_used_ratio=0.0)
    node.prefix_hit_ratio = 0.0
    node.latencies_s.append(0.0001)
    answer = await first_node(app)
    keys = ("kv_cache_used_pct", "queue_depth", "engine_running", "prefix_hit_ratio", "p99_latency_ms")
    assert [answer[key] for key in keys] == [0, 0, 0, 0, 0]


async def test_a_stale_report_says_nothing(app: App) -> None:
    app.nodes["node-a100-01"].report = EngineReport(app.now_s, waiting=2, kv_used_ratio=0.5)
    app.now_s += REPORT_FRESH_S + 0.1
    answer = await first_node(app)
    assert (answer["kv_cache_used_pct"], answer["queue_depth"], answer["report_age_s"]) == (None, None, None)
    assert answer["knowledge_level"] == "hardware"


@pytest.mark.parametrize("health", ["healthy", "degraded", "offline"])
async def test_a_drain_does_not_change_the_health(app: App, health: str) -> None:
    node = app.nodes["node-a100-01"]
    node.health, node.drained, node.last_error = Health(health), True, "connection refused"
    answer = await first_node(app)
    assert (answer["status"], answer["drained"]) == (health, True)
    assert answer["last_error"] == "connection refused"


async def test_configuration_is_shown(app: App) -> None:
    app.context.config_errors.append("inferact.yaml:3: nodes[0].hardware: no such hardware")
    answer = await status(app)
    assert answer["scheduler_version"] == __version__
    assert answer["config_errors"] == ["inferact.yaml:3: nodes[0].hardware: no such hardware"]
    assert [node["models"] for node in answer["nodes"]] == [
        [LLAMA, "shared"],
        ["only-rtx", "shared", "small"],
    ]
    assert [node["weight"] for node in answer["nodes"]] == [1.0, 0.5]


async def test_the_policy_is_the_one_in_force_as_in_the_metrics(app: App) -> None:
    app.context.router.policy = Policy(CachePolicy.ADAPTIVE)
    assert (await status(app))["policy"] == "lru"


async def test_uptime_is_in_whole_seconds(app: App) -> None:
    app.now_s += 3842.9
    assert (await status(app))["uptime_seconds"] == 3842


async def test_the_total_outlives_a_node(app: App) -> None:
    for node in app.nodes.values():
        app.context.telemetry.served(node, "shared", 0.1)
    del app.nodes["node-rtx-01"]
    answer = await status(app)
    assert answer["total_requests_routed"] == 2
    assert [node["requests_total"] for node in answer["nodes"]] == [1]


async def test_the_queue_is_counted(app: App) -> None:
    for _ in range(3):  # one slot a node: the second and the third wait
        app.context.admission.submit(app.request(LLAMA), 100, app.now_s, lambda: None)
    assert (await status(app))["queue_depth"] == 2


async def test_metrics_are_prometheus_text(app: App) -> None:
    app.context.telemetry.served(app.nodes["node-rtx-01"], "small", 0.2)
    response = await app.client.get("/metrics")
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    counted = {tuple(sorted(s.labels.items())): s.value for s in families["inferact_requests"].samples}
    assert counted[("model", "small"), ("node", "node-rtx-01")] == 1


async def test_a_live_process_is_healthy_even_if_it_cannot_route(app: App) -> None:
    app.obstacle = "every node is offline or drained"
    assert (await app.client.get("/healthz")).status == 200


async def test_ready_says_yes_or_why_not(app: App) -> None:
    assert (await app.client.get("/readyz")).status == 200
    app.obstacle = "every node is offline or drained"
    response = await app.client.get("/readyz")
    assert response.status == 503
    assert response.headers["x-inferact-reason"] == "no_available_node"
    assert response.headers["Retry-After"] == "1"
    assert "every node is offline or drained" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/status", "/metrics", "/healthz", "/readyz", "/health", "/v1/models"])
async def test_head_is_get_without_the_body(app: App, path: str) -> None:
    response = await app.client.head(path)
    assert response.status == 200
    assert int(response.headers["Content-Length"]) > 0
    assert await response.read() == b""
