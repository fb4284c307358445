"""Whatever goes wrong, the answer has the shape that OpenAI clients expect."""

import logging

import pytest
from admin_app import KEY, App
from aiohttp import ClientResponse


async def assert_refused(response: ClientResponse, status: int, code: str) -> dict[str, object]:
    assert (response.status, response.content_type) == (status, "application/json")
    assert response.headers["x-inferact-reason"] == code
    answer = await response.json()
    assert list(answer) == ["error"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code
    return dict(answer["error"])


@pytest.mark.parametrize("path", ["/", "/nothing", "/status/", "/v1/models/", "/v1/chat/completions", "/%ff"])
async def test_an_unknown_path(app: App, path: str) -> None:
    await assert_refused(await app.client.get(path), 404, "not_found")


@pytest.mark.parametrize(
    "path", ["/admin/", "/admin/nodes", "/admin/nodes/node-rtx-01", "/admin/nodes/a/b/drain"]
)
async def test_an_unknown_admin_path(app: App, path: str) -> None:
    response = await app.client.post(path, headers={"x-inferact-admin-key": KEY})
    await assert_refused(response, 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/status", "GET,HEAD"),
        ("DELETE", "/v1/models/shared", "GET,HEAD"),
        ("GET", "/admin/nodes/node-rtx-01/drain", "POST"),
        ("PATCH", "/admin/nodes/node-rtx-01/restore", "POST"),
        ("OPTIONS", "/metrics", "GET,HEAD"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(app: App, method: str, path: str, allow: str) -> None:
    response = await app.client.request(method, path, headers={"x-inferact-admin-key": KEY})
    await assert_refused(response, 405, "method_not_allowed")
    assert response.headers["Allow"] == allow


async def test_a_body_that_is_too_large(app: App) -> None:
    assert (await app.client.post("/probe/body", data=b"x" * 1000)).status == 200
    await assert_refused(await app.client.post("/probe/body", data=b"x" * (2 << 20)), 413, "body_too_large")


async def test_a_crash_is_logged_and_told_without_detail(app: App, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "admin"):
        error = await assert_refused(await app.client.get("/probe/crash"), 500, "internal_error")
    assert error["type"] == "server_error"
    assert "secret" not in str(error)
    assert "a secret of the code" in caplog.text


async def test_head_of_an_error_has_no_body(app: App) -> None:
    response = await app.client.head("/nothing")
    assert response.status == 404
    assert response.headers["x-inferact-reason"] == "not_found"
    assert await response.read() == b""


async def test_no_answer_tells_the_versions_of_what_serves_it(app: App) -> None:
    for path in ("/healthz", "/metrics", "/nothing", "/admin/nothing", "/probe/crash"):
        assert (await app.client.get(path)).headers.getall("Server") == ["inferact"]
