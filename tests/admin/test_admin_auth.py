"""The admin key: missing, wrong, right, and none configured. Bytes that are no UTF-8 arrive as surrogates."""

import logging

import pytest
from admin_app import KEY, App
from hypothesis import given, settings
from hypothesis import strategies as st

from admin.auth import check_admin_key
from extproc.openai.errors import ApiError, ErrorCode

PATHS = [
    "/admin/nodes/node-rtx-01/drain",
    "/admin/nodes/node-rtx-01/restore",
    "/admin/nodes/unknown/drain",
    "/admin/x",
]


async def refusal(app: App, path: str, headers: dict[str, str]) -> tuple[int, str]:
    response = await app.client.post(path, headers=headers)
    error = (await response.json())["error"]
    assert response.headers["x-inferact-reason"] == error["code"]
    assert KEY not in error["message"]
    return response.status, error["code"]


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_nothing_of_admin_can_be_called(app: App, path: str) -> None:
    assert await refusal(app, path, {}) == (401, "admin_key_required")
    assert await refusal(app, path, {"x-inferact-admin-key": ""}) == (401, "admin_key_required")
    assert not app.nodes["node-rtx-01"].drained


@pytest.mark.parametrize("given", ["wrong", KEY[:-1], KEY + "x", KEY.upper(), "ключ", "x" * 5000])
async def test_a_wrong_key_is_refused(app: App, given: str) -> None:
    assert await refusal(app, PATHS[0], {"x-inferact-admin-key": given}) == (403, "admin_key_invalid")
    assert not app.nodes["node-rtx-01"].drained


@pytest.mark.parametrize("name", ["X-Inferact-Admin-Key", "x-inferact-admin-key"])
async def test_the_right_key_passes(app: App, name: str) -> None:
    response = await app.client.post(PATHS[0], headers={name: KEY})
    assert response.status == 200


async def test_the_key_counts_only_in_its_header(app: App) -> None:
    assert (await refusal(app, PATHS[0], {"Authorization": f"Bearer {KEY}"}))[0] == 401
    assert (await refusal(app, f"{PATHS[0]}?x-inferact-admin-key=x", {}))[0] == 401


@pytest.mark.parametrize("key", [None, ""])
@pytest.mark.parametrize("headers", [{}, {"x-inferact-admin-key": KEY}, {"x-inferact-admin-key": ""}])
async def test_with_no_key_configured_admin_is_off(
    app: App, key: str | None, headers: dict[str, str]
) -> None:
    app.context.admin_key = key
    assert await refusal(app, PATHS[0], headers) == (503, "admin_disabled")


async def test_reading_needs_no_key_even_where_admin_is_off(app: App) -> None:
    app.context.admin_key = None
    for path in ("/status", "/metrics", "/healthz", "/readyz", "/health", "/v1/models"):
        assert (await app.client.get(path)).status == 200


async def test_no_key_is_ever_logged_or_shown(app: App, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await app.client.post(PATHS[0], headers={"x-inferact-admin-key": "a-wrong-one"})
        assert ("WARNING", "an admin call was refused: admin_key_invalid") in [
            (record.levelname, record.getMessage()) for record in caplog.records
        ]
        await app.client.post(PATHS[0], headers={"x-inferact-admin-key": KEY})
    assert "a-wrong-one" not in caplog.text
    assert KEY not in caplog.text
    assert KEY not in repr(app.context)


ANY_BYTES = st.binary(min_size=1).map(lambda sent: sent.decode("utf-8", "surrogateescape"))


@settings(deadline=None)
@given(given=ANY_BYTES, key=ANY_BYTES)
def test_only_the_key_itself_passes(given: str, key: str) -> None:
    check_admin_key(key, key)
    if given != key:
        with pytest.raises(ApiError) as refused:
            check_admin_key(given, key)
        assert refused.value.code is ErrorCode.ADMIN_KEY_INVALID
