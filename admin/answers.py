"""Answers in JSON."""

import msgspec
from aiohttp import web


def json_answer(value: object) -> web.Response:
    """200 with the value (anything that msgspec encodes)."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
