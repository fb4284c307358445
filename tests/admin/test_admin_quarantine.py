"""Prompts in quarantine: seen, and let out."""

from admin_app import KEY, App

HEADERS = {"x-inferact-admin-key": KEY}


def kill_two(app: App, fingerprint: int) -> None:
    """Both nodes break a prompt off, and are found dead."""
    for node_id in app.nodes:
        app.context.router.quarantine.broken(fingerprint, node_id, app.now_s)
        app.context.router.quarantine.died(node_id, app.now_s)


async def test_is_empty_at_first(app: App) -> None:
    response = await app.client.get("/admin/quarantine", headers=HEADERS)
    assert (response.status, await response.json()) == (200, {"prompts": []})


async def test_tells_which_nodes_died_of_a_prompt_and_how_long_it_is_held(app: App) -> None:
    kill_two(app, 0xBEEF)
    app.now_s += 100.0
    response = await app.client.get("/admin/quarantine", headers=HEADERS)
    prompt = {"key": "000000000000beef", "nodes": ["node-a100-01", "node-rtx-01"], "seconds_left": 500.0}
    assert await response.json() == {"prompts": [prompt]}


async def test_a_prompt_can_be_let_out(app: App) -> None:
    kill_two(app, 0xBEEF)
    kill_two(app, 0xCAFE)
    response = await app.client.delete("/admin/quarantine/000000000000beef", headers=HEADERS)
    left = [prompt["key"] for prompt in (await response.json())["prompts"]]
    assert (response.status, left) == (200, ["000000000000cafe"])
    assert not app.context.router.quarantine.holds(0xBEEF, app.now_s)


async def test_another_key_is_not_found(app: App) -> None:
    for key in ("000000000000beef", "nothing", "%2F", "x" * 2_000, "-1", "+1"):
        response = await app.client.delete(f"/admin/quarantine/{key}", headers=HEADERS)
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_needs_the_admin_key(app: App) -> None:
    kill_two(app, 0xBEEF)
    assert (await app.client.get("/admin/quarantine")).status == 401
    assert (await app.client.delete("/admin/quarantine/000000000000beef")).status == 401
    assert app.context.router.quarantine.holds(0xBEEF, app.now_s)
