"""Requests through the real Envoy: which node serves, and what clients are told."""

import json

import httpx
import pytest
from envoy_stack import ADMIN_KEY, MODEL, Stack, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_every_node_serves(stack: Stack) -> None:
    answers = [await stack.chat() for _ in range(40)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-inferact-node"] for answer in answers} == {"a", "b", "c"}
    for answer in answers:
        assert answer.headers["x-sim-node"] == answer.headers["x-inferact-node"]
        assert answer.headers["x-inferact-attempts"] == "1"
        assert answer.headers["x-request-id"]


async def test_a_prompt_goes_back_to_the_node_that_has_its_beginning(stack: Stack) -> None:
    for topic in ("bees", "ants"):
        turns = [{"role": "user", "content": f"Tell me all about {topic}. " * 400}]
        nodes = set()
        for _ in range(8):
            answer = await stack.chat(messages=turns, max_tokens=4)
            nodes.add(answer.headers["x-sim-node"])
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        assert len(nodes) == 1


@pytest.mark.parametrize("node", ["a", "b", "c"])
async def test_affinity_pins_the_node(stack: Stack, node: str) -> None:
    for _ in range(5):
        answer = await stack.chat(**{"x-inferact": {"node_affinity": node}})
        assert answer.headers["x-sim-node"] == node


async def test_affinity_to_an_unknown_node_is_a_clear_error(stack: Stack) -> None:
    answer = await stack.chat(**{"x-inferact": {"node_affinity": "nobody"}})
    assert answer.status_code == 400
    assert answer.headers["x-inferact-reason"] == "invalid_hint"
    assert answer.json()["error"]["param"] == "x-inferact.node_affinity"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "nobody/knows", "messages": []}', 404, "model_not_found"),
        (b'{"model": "' + MODEL.encode() + b'", "messages": [', 400, "invalid_json"),
        (b"[1, 2]", 400, "invalid_request"),
        (b'{"messages": []}', 400, "invalid_request"),
        (b"", 400, "invalid_json"),
        (b'{"model": "' + MODEL.encode() + b'", "x-inferact": {"priority": 11}}', 400, "invalid_hint"),
    ],
)
async def test_bad_bodies_get_openai_errors_and_reach_no_node(
    stack: Stack, body: bytes, status: int, code: str
) -> None:
    before = stack.attempts()
    answer = await stack.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-inferact-reason"] == code
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert stack.attempts() == before
    assert set(stack.in_flight().values()) == {0}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("POST", "/status", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods(stack: Stack, method: str, path: str, status: int, code: str) -> None:
    answer = await stack.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-inferact-reason"] == code
    if status == 405:
        assert answer.headers["allow"]


async def test_forged_routing_headers_are_ignored(stack: Stack) -> None:
    forged = {
        "x-inferact-cluster": "c",
        "x-inferact-retry-1": "c",
        "x-inferact-id": "forged",
        "x-inferact-node": "c",
        "x-envoy-max-retries": "9",
        "x-envoy-retry-on": "5xx",
        "x-envoy-attempt-count": "2",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "X-Envoy-Upstream-Alt-Stat-Name": "x",
    }
    for _ in range(10):
        answer = await stack.chat(headers=forged, **{"x-inferact": {"node_affinity": "a"}})
        assert answer.headers["x-sim-node"] == "a"
        seen = {name.lower(): value for name, value in stack.sims["a"].stats.recorded[-1].headers}
        assert seen["x-inferact-cluster"] == "a"
        assert seen["x-inferact-id"] != "forged"
        assert seen["x-envoy-attempt-count"] == "1"
        assert {"x-inferact-retry-1", "x-envoy-retry-on", "x-envoy-upstream-alt-stat-name"}.isdisjoint(seen)


async def test_forged_headers_do_not_open_unrouted_requests(stack: Stack) -> None:
    before = stack.attempts()
    answer = await stack.client.post("/v1/chat/completions", content=b"", headers={"x-inferact-cluster": "a"})
    assert answer.status_code == 400
    assert stack.attempts() == before


async def test_the_admin_key_never_reaches_a_node(stack: Stack) -> None:
    await stack.chat(headers={"x-inferact-admin-key": ADMIN_KEY}, **{"x-inferact": {"node_affinity": "a"}})
    assert "x-inferact-admin-key" not in {
        name.lower() for name, _ in stack.sims["a"].stats.recorded[-1].headers
    }


async def test_a_clients_request_id_comes_back(stack: Stack) -> None:
    answer = await stack.chat(headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


async def test_admin_pages_through_envoy(stack: Stack) -> None:
    status = (await stack.client.get("/status")).json()
    assert [node["id"] for node in status["nodes"]] == ["a", "b", "c"]
    assert {node["status"] for node in status["nodes"]} == {"healthy"}
    assert [model["id"] for model in (await stack.client.get("/v1/models")).json()["data"]] == [MODEL]
    assert (await stack.client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await stack.client.get("/healthz")).status_code == 200
    for path in ("/readyz", "/health"):
        assert (await stack.client.get(path)).status_code == 200
    assert "inferact_requests_total" in (await stack.client.get("/metrics")).text
    assert (await stack.client.post("/admin/nodes/a/drain")).status_code == 401


async def test_counters_name_the_node_that_served(stack: Stack) -> None:
    for _ in range(3):
        await stack.chat(**{"x-inferact": {"node_affinity": "b"}})
    arrived = {name: sum(sim.stats.attempts.values()) for name, sim in stack.sims.items()}
    nodes = stack.service.router.nodes
    await until(lambda: {name: nodes[name].requests_total for name in arrived} == arrived)
    status = (await stack.client.get("/status")).json()
    assert {node["id"]: node["requests_total"] for node in status["nodes"]} == arrived
    assert status["total_requests_routed"] == sum(arrived.values())
    (shown,) = [node for node in status["nodes"] if node["id"] == "b"]
    assert shown["p99_latency_ms"] >= 0


async def test_http2_prior_knowledge(stack: Stack) -> None:
    async with httpx.AsyncClient(http1=False, http2=True, base_url=stack.url, trust_env=False) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")


async def test_every_routed_path_reaches_a_node(stack: Stack) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/completions": {"prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/v1/embeddings": {"input": "hi"},
        "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
        "/v1/score": {"text_1": "hi", "text_2": "ho"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1, 2]},
    }
    for path, body in bodies.items():
        answer = await stack.client.post(path, json={"model": MODEL} | body)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-inferact-node"] in stack.sims
        json.loads(answer.text)
