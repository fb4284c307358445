"""`GET /v1/models`: what clients can ask for, as OpenAI lists it."""

import msgspec
from aiohttp import web

from admin.context import CONTEXT, AdminContext, json_answer
from admin.described import described
from extproc.openai.errors import ApiError, ErrorCode, shown


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model in OpenAI's shape; `created` is when the service started, in Unix seconds."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "inferact"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Models in OpenAI's shape."""

    object: str = "list"
    data: list[Model]


@described("Every model that some undrained node serves.", ModelList)
async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`: every model that some undrained node serves."""
    return json_answer(ModelList(data=_models(request.config_dict[CONTEXT])))


@described("One of these models.", Model, ErrorCode.MODEL_NOT_FOUND)
async def get_model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`; ids may hold slashes. Raises `ApiError` for any other model."""
    model_id = request.match_info["id"]
    for model in _models(request.config_dict[CONTEXT]):
        if model.id == model_id:
            return json_answer(model)
    raise ApiError(ErrorCode.MODEL_NOT_FOUND, f"The model `{shown(model_id)}` does not exist.", param="model")


def _models(context: AdminContext) -> list[Model]:
    return [Model(id=name, created=context.started_unix_s) for name in context.router.models()]
