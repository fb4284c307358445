"""The OpenAPI document: complete, and true of what the endpoints answer."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from admin_app import KEY, LLAMA, App
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from admin.app import make_app
from admin.openapi import document

FOR_PEOPLE = "/dashboard"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an app on a loop of its own, which has decided on a request and quarantined a prompt."""
    app = App(tmp_path_factory.mktemp("drains") / "drains.sqlite")
    decision = app.context.router.decide(app.request(LLAMA), app.now_s)
    assert decision is not None
    app.context.router.receipts.keep(decision.receipt, "exchange-1", "request-1", 0.0)
    for node_id in app.nodes:
        app.context.router.quarantine.broken(0xBEEF, node_id, app.now_s)
        app.context.router.quarantine.died(node_id, app.now_s)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(make_app(app.context))
    yield asyncio.run_coroutine_threadsafe(listening(runner), loop).result(10)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def listening(runner: web.AppRunner) -> str:
    """Start to serve on a free port."""
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return "http://{}:{}".format(*runner.addresses[0])


def routes(app: web.Application) -> set[tuple[str, str]]:
    return {
        (route.resource.canonical, route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def test_every_endpoint_is_described(tmp_path: Path) -> None:
    app = make_app(App(tmp_path / "drains.sqlite").context)
    paths = document(app)["paths"]
    there = {(path, method) for path, operations in paths.items() for method in operations}
    assert there == {(path, method) for path, method in routes(app) if not path.startswith(FOR_PEOPLE)}


async def test_it_needs_the_admin_key_like_all_of_admin(app: App) -> None:
    assert (await app.client.get("/admin/openapi.json")).status == 401
    response = await app.client.get("/admin/openapi.json", headers={"X-Inferact-Admin-Key": KEY})
    assert (await response.json())["openapi"].startswith("3.1")


def test_what_needs_the_key_says_so(tmp_path: Path) -> None:
    for path, operations in document(make_app(App(tmp_path / "drains.sqlite").context))["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == path.startswith("/admin/")
            assert ("401" in operation["responses"]) == path.startswith("/admin/")


SCHEMA = schemathesis.openapi.from_dict(document(make_app(App(Path("drains.sqlite")).context)))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
NOT_OURS = [
    ignored_auth,  # each call brings the key: what happens without it has tests of its own
    positive_data_acceptance,  # a body that is to be explained follows the API that it is for
]


def check(case: Any, url: str) -> Any:
    """Make the call, and hold the answer against the document."""
    return case.call_and_validate(
        base_url=url, headers={"X-Inferact-Admin-Key": KEY}, excluded_checks=NOT_OURS
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda found: found.label)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_answers_to_anything_are_what_the_document_says(served: str, operation: Any, data: Any) -> None:
    check(data.draw(operation.as_strategy()), served)


@pytest.mark.parametrize(
    ("path", "method", "call"),
    [
        ("/status", "GET", {}),
        ("/v1/models/{id}", "GET", {"path_parameters": {"id": "shared"}}),
        ("/admin/nodes/{id}/drain", "POST", {"path_parameters": {"id": "node-rtx-01"}}),
        ("/admin/nodes/{id}/restore", "POST", {"path_parameters": {"id": "node-rtx-01"}}),
        ("/admin/decisions", "GET", {"query": {"limit": 1}}),
        ("/admin/decisions/{request_id}", "GET", {"path_parameters": {"request_id": "request-1"}}),
        ("/admin/explain", "POST", {"body": {"model": LLAMA, "messages": []}}),
        ("/admin/quarantine", "GET", {}),
        ("/admin/quarantine/{key}", "DELETE", {"path_parameters": {"key": "000000000000beef"}}),
    ],
)
def test_what_succeeds_is_what_the_document_says(
    served: str, path: str, method: str, call: dict[str, Any]
) -> None:
    media = {"media_type": "application/json"} if "body" in call else {}
    assert check(SCHEMA[path][method].Case(**call, **media), served).status_code == 200
