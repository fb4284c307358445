"""The ext_proc replies that the service makes, as bytes.

A protobuf message may be written in parts, one after the other, and what lies in the same field is merged. So
the reply that routes a request is put together of parts that were encoded before; only values change.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
    TrailersResponse,
)

from extproc import headers
from extproc.openai.errors import ApiError
from extproc.openai.request import RoutingRequest
from extproc.routing.receipts import Receipt
from extproc.routing.router import Decision

READ_BODY: Final[bytes] = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
"""The headers are noted: now the body."""
GO_ON: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "response_headers": ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
        "response_body": ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
        "request_trailers": ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
        "response_trailers": ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
    }
)
"""`Go on, unchanged`, by the kind of message that may follow the decision."""

HOLD_MARGIN_S = 2.0
"""How much longer Envoy waits than we hold a request: else it would fail open before our 504."""
LONGEST_HOLD_S = 3600.0 - HOLD_MARGIN_S
"""Envoy takes no longer override than an hour: it would ignore it, and fail open."""

_RETRY_HEADERS = (headers.RETRY_1, headers.RETRY_2)


def route(
    decision: Decision,
    request: RoutingRequest,
    exchange_id: str,
    body: bytes | None,
    left_s: float,
    once_bytes: int = 0,
) -> bytes:
    """Send the request to the decided node, with its fallbacks; `body` replaces the client's if given.

    Of that, `once_bytes` after the first brace are for the decided node alone.

    `left_s` is what remains of the request's time. A stream must begin within it, each attempt within its
    share; any other answer must be complete, its first byte being its end.
    """
    fallbacks = decision.fallbacks
    parts = [
        _model(request.model),
        _told(decision.receipt),
        *_header(headers.EXCHANGE, exchange_id),
        *_header(headers.CLUSTER, decision.node.id),
        *_header(headers.MAX_RETRIES, str(len(fallbacks))),
    ]
    for header, node in zip(_RETRY_HEADERS, fallbacks, strict=False):
        parts += _header(header, node.id)
    if request.stream:
        parts += _header(headers.TRY_TIMEOUT_MS, _milliseconds(left_s / (len(fallbacks) + 1)))
    else:
        parts += _header(headers.REQUEST_TIMEOUT_MS, _milliseconds(left_s))
    if once_bytes:
        parts += _header(headers.TRANSFER, str(once_bytes))
    if body is not None:
        parts += _header("content-length", str(len(body)))
        common = CommonResponse(body_mutation=BodyMutation(body=body))
        parts.append(_encoded(ProcessingResponse(request_body=BodyResponse(response=common))))
    return b"".join(parts)


def hold(timeout_s: float) -> bytes:
    """Wait for the reply that follows: the request is in the queue."""
    reply = ProcessingResponse()
    reply.override_message_timeout.FromMilliseconds(math.ceil((timeout_s + HOLD_MARGIN_S) * 1000))
    return _encoded(reply)


def reject(error: ApiError) -> bytes:
    """Answer the client now, with an OpenAI-shaped error."""
    answer = ImmediateResponse(body=error.body(), details=headers.ANSWERED + error.code.value)
    answer.status.code = error.code.status
    _set(answer.headers, "content-type", "application/json")
    _set(answer.headers, headers.REASON, error.code.value)
    if error.retry_after_s is not None:
        _set(answer.headers, "retry-after", str(error.retry_after_s))
    return _encoded(ProcessingResponse(immediate_response=answer))


@lru_cache(maxsize=1024)
def _model(name: str) -> bytes:
    """The part of a routing reply that all requests for a model have in common."""
    reply = ProcessingResponse()
    reply.request_body.response.clear_route_cache = True
    ours = reply.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
    ours.fields["model"].string_value = name
    return _encoded(reply)


def _told(receipt: Receipt) -> bytes:
    """The part of a routing reply that tells access log and spans of the decision."""
    reply, chosen = ProcessingResponse(), next(receipt.candidates())
    told = reply.dynamic_metadata.fields[headers.DECISION_NAMESPACE].struct_value.fields
    told[headers.COST_S].number_value = round(chosen.cost_s, 6)
    told[headers.PROMPT_TOKENS].number_value = round(receipt.prompt_tokens)
    told[headers.MATCHED_TOKENS].number_value = chosen.matched_tokens
    told[headers.WAITED_S].number_value = round(receipt.waited_s, 6)
    return _encoded(reply)


def _header(name: str, value: str) -> tuple[bytes, bytes, bytes]:
    """The part of a routing reply that sets a request header."""
    encoded = value.encode()
    before, after = _around(name, len(encoded))
    return before, encoded, after


@lru_cache(maxsize=1024)
def _around(name: str, length: int) -> tuple[bytes, bytes]:
    """What stands before and after a header's value of so many bytes: it depends on nothing else."""
    value = "\0" * length
    reply = ProcessingResponse()
    _set(reply.request_body.response.header_mutation, name, value)
    before, _, after = _encoded(reply).partition(value.encode())
    return before, after


def _set(mutation: HeaderMutation, name: str, value: str) -> None:
    """Overwrite: the default appends, and a client's own value would stay in front."""
    mutation.set_headers.append(
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
    )


def _encoded(reply: ProcessingResponse) -> bytes:
    encoded: bytes = reply.SerializeToString()
    return encoded


def _milliseconds(seconds: float) -> str:
    """Rounded up, and never 0, which would mean for ever."""
    return str(max(1, math.ceil(seconds * 1000)))
