"""`GET /admin/openapi.json`: the endpoints, as OpenAPI 3.1, from the routes and what their handlers say."""

import re
from collections import defaultdict
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.hdrs import METH_HEAD

from admin.context import json_answer
from admin.described import Description, ErrorAnswer, described, description
from extproc import __version__, headers
from extproc.openai.errors import ErrorCode

_KEY = "adminKey"
_KEYED = "/admin/"
_KEY_REFUSALS = (ErrorCode.ADMIN_KEY_REQUIRED, ErrorCode.ADMIN_KEY_INVALID, ErrorCode.ADMIN_DISABLED)
_SCHEMAS = "#/components/schemas/{name}"
_JSON = "application/json"


@described("This document.", {"type": "object"})
async def openapi(request: web.Request) -> web.Response:
    """`GET /admin/openapi.json`."""
    return json_answer(document(request.match_info.apps[0]))


def document(app: web.Application) -> dict[str, Any]:
    """The OpenAPI document of every route whose handler is described."""
    found = [(route, it) for route in app.router.routes() if (it := description(route)) is not None]
    types = [ErrorAnswer, *dict.fromkeys(it.answer for _, it in found if isinstance(it.answer, type))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route, it in found:
        if route.method != METH_HEAD and route.resource is not None:
            path = route.resource.canonical
            paths[path][route.method.lower()] = _operation(path, it, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Inferact", "version": __version__, "description": "What the admin app answers."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {_KEY: {"type": "apiKey", "in": "header", "name": headers.ADMIN_KEY}},
        },
    }


def _operation(path: str, it: Description, refs: dict[Any, Any]) -> dict[str, Any]:
    keyed = path.startswith(_KEYED)
    operation: dict[str, Any] = {
        "summary": it.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _ID} for name in _names(path)),
            *({"name": name, "in": "query", "schema": schema} for name, schema in it.query.items()),
        ],
        "responses": {
            "200": {"description": it.summary, "content": _content(it.answer, refs)},
            **_refusals((*it.refusals, *(_KEY_REFUSALS if keyed else ())), refs),
        },
    }
    if it.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": it.body}}}
    if keyed:
        operation["security"] = [{_KEY: []}]
    return operation


_ID = {"type": "string", "minLength": 1}


def _names(path: str) -> list[str]:
    """The parameters in a path."""
    return re.findall(r"\{(\w+)\}", path)


def _content(answer: Any, refs: dict[Any, Any]) -> dict[str, Any]:
    """The media type of an answer, and its schema."""
    if isinstance(answer, str):
        return {answer: {"schema": {"type": "string"}}}
    return {_JSON: {"schema": refs[answer] if isinstance(answer, type) else answer}}


def _refusals(codes: tuple[ErrorCode, ...], refs: dict[Any, Any]) -> dict[str, Any]:
    """The errors by status, and whatever else goes wrong with a call."""
    by_status: dict[str, list[str]] = defaultdict(list)
    for code in codes:
        by_status[str(code.status.value)].append(code.value)
    content = _content(ErrorAnswer, refs)
    answers = {
        status: {"description": ", ".join(names), "content": content} for status, names in by_status.items()
    }
    return answers | {"default": {"description": "Any other error.", "content": content}}
