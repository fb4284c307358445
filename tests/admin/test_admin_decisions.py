"""Decisions and dry runs: what an operator is told of them, and what not."""

import gzip
import json
import logging
import time
from typing import Any

import msgspec
import pytest
from admin_app import KEY, App
from aiohttp import ClientResponse

from extproc.openai.request import Api
from extproc.routing.receipts import LONGEST_ID, RECEIPTS, Reason
from extproc.routing.router import Decision

A100, RTX = "node-a100-01", "node-rtx-01"
TERMS = ["wait", "prefill", "queue", "pressure", "decode", "harm"]
CHAT = {"model": "shared", "messages": [{"role": "user", "content": "secret words " * 50}]}


def decided(app: App, request_id: str, exchange_id: str, waited_s: float = 0.0) -> Decision:
    """A decision that was carried out."""
    decision = app.context.router.decide(app.request("shared"), app.now_s)
    assert decision is not None
    app.context.router.receipts.keep(decision.receipt, exchange_id, request_id, waited_s)
    return decision


async def get(app: App, path: str) -> ClientResponse:
    return await app.client.get(path, headers={"x-inferact-admin-key": KEY})


async def told(app: App, path: str) -> dict[str, Any]:
    response = await get(app, path)
    assert response.status == 200
    return dict(await response.json())


async def explain(app: App, body: object, query: str = "", **headers: str) -> ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers |= {"x-inferact-admin-key": KEY}
    return await app.client.post(f"/admin/explain{query}", data=data, headers=headers)


async def refusal(response: ClientResponse) -> tuple[int, str, str]:
    """Status, code and message of an answer that must be an error."""
    error = (await response.json())["error"]
    assert response.headers["x-inferact-reason"] == error["code"]
    return response.status, error["code"], error["message"]


class TestDecision:
    async def test_is_found_by_either_id_and_tells_the_receipt(self, app: App) -> None:
        decision = decided(app, "request-1", "exchange-1", waited_s=0.25)
        answer = await told(app, "/admin/decisions/request-1")
        by_exchange = await told(app, "/admin/decisions/exchange-1")
        assert by_exchange == answer | {"decided_at": by_exchange["decided_at"]}
        assert (answer["request_id"], answer["exchange_id"]) == ("request-1", "exchange-1")
        assert (answer["model"], answer["policy"], answer["waits"]) == ("shared", "prefix-aware", False)
        assert (answer["waited_s"], answer["pinned"], answer["equally_cheap"]) == (0.25, False, 1)
        assert (answer["excluded"], answer["failed_attempts"], answer["outcome"]) == ([], [], None)
        assert answer["prompt_tokens"] >= 1 and answer["expected_output_tokens"] == 256
        first, second = answer["candidates"]
        assert (first["node"], first["role"]) == (decision.node.id, "chosen")
        assert (second["node"], second["role"]) == (decision.fallbacks[0].id, "fallback")
        assert answer["fallbacks"] == [second["node"]]
        assert answer["why"].startswith(f"{decision.node.id} was chosen: ")
        assert answer["predicted_ttft_s"] > 0

    async def test_has_candidates_whose_terms_make_up_the_cost(self, app: App) -> None:
        decided(app, "r", "e")
        for line in (await told(app, "/admin/decisions/r"))["candidates"]:
            assert list(line["terms_s"]) == TERMS
            assert sum(line["terms_s"].values()) / line["weight"] == pytest.approx(line["cost_s"], abs=1e-5)
            assert line["hardware"] == app.nodes[line["node"]].config.hardware
            assert (line["matched_tokens"], line["put_back"]) == (0, [])

    async def test_gives_no_role_to_a_candidate_that_is_no_fallback(self, app: App) -> None:
        receipt = msgspec.structs.replace(decided(app, "r", "e").receipt, fallbacks=())
        app.context.router.receipts.keep(receipt, "e", "r", 0.0)
        answer = await told(app, "/admin/decisions/r")
        assert [line["role"] for line in answer["candidates"]] == ["chosen", None]
        assert answer["fallbacks"] == []

    async def test_says_why_a_node_was_left_out(self, app: App) -> None:
        app.nodes[RTX].drained = True
        decided(app, "r", "e")
        answer = await told(app, "/admin/decisions/r")
        assert [line["node"] for line in answer["candidates"]] == [A100]
        assert answer["excluded"] == [{"node": RTX, "reason": "drained"}]

    async def test_has_the_time_of_the_day(self, app: App) -> None:
        decided(app, "r", "e")
        app.now_s += 60.0
        answer = await told(app, "/admin/decisions/r")
        assert answer["decided_at"] == pytest.approx(time.time() - 60.0, abs=30.0)

    async def test_names_attempts_that_failed(self, app: App) -> None:
        decision = decided(app, "r", "e")
        decision.receipt.failed.append((decision.node.id, "503"))
        answer = await told(app, "/admin/decisions/r")
        assert answer["failed_attempts"] == [{"node": decision.node.id, "reason": "503"}]

    @pytest.mark.parametrize(
        ("request_id", "path"),
        [("a/b?c#d", "a%2Fb%3Fc%23d"), ("é ", "%C3%A9%20"), ("x" * 4000, "x" * 4000), ("%2F", "%252F")],
    )
    async def test_is_found_by_whatever_a_client_took_for_an_id(
        self, app: App, request_id: str, path: str
    ) -> None:
        decided(app, request_id, "e")
        assert (await told(app, f"/admin/decisions/{path}"))["request_id"] == request_id[:LONGEST_ID]

    @pytest.mark.parametrize("path", ["unknown", "a/b", "%00", "%ff", "é", "x" * 4000, "%1b%5b31m"])
    async def test_that_is_unknown_is_not_found_and_says_what_to_do(self, app: App, path: str) -> None:
        decided(app, "r", "e")
        status, code, message = await refusal(await get(app, f"/admin/decisions/{path}"))
        assert (status, code) == (404, "not_found")
        assert "x-request-id" in message and f"{RECEIPTS:,}" in message
        assert message.isprintable() and len(message) < 500

    @pytest.mark.parametrize("path", ["/admin/decisions/r", "/admin/decisions"])
    async def test_needs_the_admin_key(self, app: App, path: str) -> None:
        decided(app, "r", "e")
        assert (await refusal(await app.client.get(path)))[:2] == (401, "admin_key_required")
        wrong = {"x-inferact-admin-key": "wrong"}
        assert (await refusal(await app.client.get(path, headers=wrong)))[:2] == (403, "admin_key_invalid")


class TestList:
    async def test_is_empty_at_first(self, app: App) -> None:
        assert await told(app, "/admin/decisions") == {"decisions": []}

    async def test_begins_with_the_latest(self, app: App) -> None:
        app.context.router.cap = None
        for number in range(30):
            decided(app, f"r{number}", f"e{number}")
        listed = (await told(app, "/admin/decisions"))["decisions"]
        latest = await told(app, "/admin/decisions/r29")
        assert [decision["request_id"] for decision in listed] == [f"r{n}" for n in range(29, 9, -1)]
        assert listed[0] == latest | {"decided_at": listed[0]["decided_at"]}
        for limit in (1, 30, 200):
            assert len((await told(app, f"/admin/decisions?limit={limit}"))["decisions"]) == min(limit, 30)

    @pytest.mark.parametrize("limit", ["", "0", "-1", "201", "1e2", "1.5", "x", "٣", "1_0", "+1", "9" * 5000])
    async def test_refuses_a_limit_that_is_none(self, app: App, limit: str) -> None:
        response = await app.client.get(
            "/admin/decisions", params={"limit": limit}, headers={"x-inferact-admin-key": KEY}
        )
        status, code, message = await refusal(response)
        assert (status, code) == (400, "invalid_request")
        assert "1 to 200" in message


class TestExplain:
    async def test_tells_what_would_be_decided_and_changes_nothing(self, app: App) -> None:
        response = await explain(app, CHAT)
        answer = await response.json()
        assert response.status == 200
        assert (answer["request_id"], answer["exchange_id"], answer["waits"]) == (None, None, False)
        assert answer["decided_at"] == pytest.approx(time.time(), abs=30.0)
        assert all(node.in_flight == 0 for node in app.nodes.values())
        assert await told(app, "/admin/decisions") == {"decisions": []}
        assert decided(app, "r", "e").node.id == answer["candidates"][0]["node"]

    async def test_tells_that_a_request_would_wait(self, app: App) -> None:
        for number in range(2):
            decided(app, f"r{number}", f"e{number}")
        answer = await (await explain(app, CHAT)).json()
        assert answer["waits"]
        assert [line["put_back"] for line in answer["candidates"]] == [[Reason.FULL]] * 2

    async def test_heeds_the_hints(self, app: App) -> None:
        answer = await (await explain(app, CHAT | {"x-inferact": {"node_affinity": RTX}})).json()
        assert answer["pinned"]
        assert [line["node"] for line in answer["candidates"]] == [RTX]

    async def test_reads_the_body_as_the_named_api_does(self, app: App) -> None:
        body = {"model": "shared", "prompt": "word " * 4000}
        lengths = [
            (await (await explain(app, body, f"?path={path}")).json())["prompt_tokens"]
            for path in ("/v1/completions", "/v1/chat/completions")
        ]
        assert lengths[0] > 4000 > lengths[1]

    @pytest.mark.parametrize("path", ["", "/", "/v1/completion", "/status", "v1/completions", "%00"])
    async def test_names_the_paths_where_one_is_wrong(self, app: App, path: str) -> None:
        status, code, message = await refusal(await explain(app, CHAT, f"?path={path}"))
        assert (status, code) == (400, "invalid_request")
        assert all(api in message for api in Api)

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b"", (400, "invalid_json")),
            (b"{", (400, "invalid_json")),
            (b'{"model": "\xff"}', (400, "invalid_json")),
            (b"[" * 200_000, (400, "invalid_request")),
            (b'{"messages": ' + b"[" * 200_000, (400, "invalid_json")),
            ([], (400, "invalid_request")),
            ({}, (400, "invalid_request")),
            ({"model": 1}, (400, "invalid_request")),
            (CHAT | {"x-inferact": {"priority": 11}}, (400, "invalid_hint")),
            (CHAT | {"x-inferact": {"node_affinity": "nowhere"}}, (400, "invalid_hint")),
            (CHAT | {"model": "unknown"}, (404, "model_not_found")),
        ],
    )
    async def test_refuses_what_the_request_would_be_refused_for(
        self, app: App, body: object, expected: tuple[int, str]
    ) -> None:
        assert (await refusal(await explain(app, body)))[:2] == expected

    async def test_tells_that_no_node_can_take_it(self, app: App) -> None:
        for node in app.nodes.values():
            node.drained = True
        response = await explain(app, CHAT)
        assert (await refusal(response))[:2] == (503, "no_available_node")
        assert response.headers["Retry-After"] == "1"

    async def test_takes_bodies_up_to_the_limit_of_requests(self, app: App) -> None:
        limit = app.context.config().scheduler.max_body_bytes
        assert limit > 1 << 20
        body = json.dumps(CHAT).encode()
        assert (await explain(app, body.ljust(limit))).status == 200
        assert (await refusal(await explain(app, body.ljust(limit + 1))))[:2] == (413, "body_too_large")

    async def test_takes_a_compressed_body_and_refuses_one_that_is_broken(self, app: App) -> None:
        packed = {"content-encoding": "gzip"}
        assert (await explain(app, gzip.compress(json.dumps(CHAT).encode()), **packed)).status == 200
        assert (await refusal(await explain(app, b"no gzip", **packed)))[0] == 400

    async def test_needs_the_admin_key(self, app: App) -> None:
        response = await app.client.post("/admin/explain", json=CHAT)
        assert (await refusal(response))[:2] == (401, "admin_key_required")

    async def test_repeats_nothing_of_the_prompt(self, app: App, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            for body in (CHAT, CHAT | {"model": "unknown"}, json.dumps(CHAT).encode()[:-1], [CHAT]):
                assert "secret" not in await (await explain(app, body)).text()
        assert "secret" not in caplog.text
