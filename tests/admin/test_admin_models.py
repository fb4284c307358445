"""`/v1/models`: only what some undrained node serves."""

import time
from typing import Any

import pytest
from admin_app import LLAMA, App
from openai import AsyncOpenAI, NotFoundError


async def listed(app: App) -> list[dict[str, Any]]:
    response = await app.client.get("/v1/models")
    answer = await response.json()
    assert answer["object"] == "list"
    return list(answer["data"])


async def test_models_and_aliases_are_listed_once_in_openai_shape(app: App) -> None:
    models = await listed(app)
    assert [model["id"] for model in models] == sorted([LLAMA, "only-rtx", "shared", "small"])
    for model in models:
        assert list(model) == ["id", "object", "created", "owned_by"]
        assert model["object"] == "model"
        assert abs(model["created"] - time.time()) < 600


async def test_a_model_of_drained_nodes_alone_is_gone_until_the_restore(app: App) -> None:
    await app.drain("node-rtx-01")
    assert [model["id"] for model in await listed(app)] == [LLAMA, "shared"]
    assert (await app.client.get("/v1/models/small")).status == 404
    await app.restore("node-rtx-01")
    assert (await app.client.get("/v1/models/small")).status == 200


@pytest.mark.parametrize("path", [LLAMA, LLAMA.replace("/", "%2F"), LLAMA.replace("-", "%2d")])
async def test_a_model_is_found_with_its_slashes_plain_or_escaped(app: App, path: str) -> None:
    response = await app.client.get(f"/v1/models/{path}")
    assert response.status == 200
    assert (await response.json())["id"] == LLAMA


@pytest.mark.parametrize(
    "name", ["gpt-9", "shared/", "meta-llama", "SHARED", "%00", "%ff%fe", "é", "x" * 7000]
)
async def test_any_other_model_is_not_found(app: App, name: str) -> None:
    response = await app.client.get(f"/v1/models/{name}")
    error = (await response.json())["error"]
    assert response.status == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert response.headers["x-inferact-reason"] == "model_not_found"
    assert len(error["message"]) < 300


async def test_the_openai_client_reads_it(app: App) -> None:
    async with AsyncOpenAI(base_url=str(app.client.make_url("/v1")), api_key="unused") as client:
        assert [model.id async for model in client.models.list()] == [m["id"] for m in await listed(app)]
        assert (await client.models.retrieve(LLAMA)).id == LLAMA
        with pytest.raises(NotFoundError) as refused:
            await client.models.retrieve("gpt-9")
        assert refused.value.code == "model_not_found"
