"""Decisions: why a request went where it did, and where one would go now."""

import asyncio
import re
import time
from typing import Final

import msgspec
from aiohttp import web

from admin.context import CONTEXT, AdminContext, json_answer
from admin.described import described
from extproc.openai.errors import ApiError, ErrorCode, shown
from extproc.openai.request import Api, parse
from extproc.reports import CandidateReport, DecisionList, DecisionReport, NodeReason, PrefillReport, Role
from extproc.routing.node import Node
from extproc.routing.receipts import RECEIPTS, Candidate, Receipt, SplitTerms
from extproc.verdict import headline

_LISTED: Final = 20
_MOST_LISTED: Final = 200
_LIMIT: Final = re.compile("[0-9]{1,3}")
_DIGITS: Final = 6


@described("Why a request went where it did.", DecisionReport, ErrorCode.NOT_FOUND)
async def get_decision(request: web.Request) -> web.Response:
    """`GET /admin/decisions/{request_id}`. Raises `ApiError` for an id that is not known (any more)."""
    context = request.config_dict[CONTEXT]
    any_id = request.match_info["request_id"]
    receipt = context.router.receipts.find(any_id)
    if receipt is None:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"There is no decision on a request `{shown(any_id)}`: give the x-request-id of its answer. The "
            f"last {RECEIPTS:,} decisions since the service started are kept; requests that were refused, or "
            "still wait, have none.",
        )
    return json_answer(_report(receipt, _unix_offset_s(context)))


@described(
    "The latest decisions, the newest first.",
    DecisionList,
    ErrorCode.INVALID_REQUEST,
    query={"limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED, "default": _LISTED}},
)
async def list_decisions(request: web.Request) -> web.Response:
    """`GET /admin/decisions?limit=N`: the latest. Raises `ApiError` for a limit that is none."""
    context = request.config_dict[CONTEXT]
    receipts = context.router.receipts.latest(_limit(request.query.get("limit", str(_LISTED))))
    offset_s = _unix_offset_s(context)
    # Two hundred take milliseconds; receipts that are kept change in nothing that could tear.
    reports = await asyncio.to_thread(lambda: [_report(receipt, offset_s) for receipt in receipts])
    return json_answer(DecisionList(reports))


@described(
    "Where a request with this body would go now; nothing is sent.",
    DecisionReport,
    *(ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_HINT, ErrorCode.MODEL_NOT_FOUND),
    *(ErrorCode.BODY_TOO_LARGE, ErrorCode.POISONOUS_REQUEST, ErrorCode.NO_AVAILABLE_NODE),
    ErrorCode.NODE_UNAVAILABLE,
    query={"path": {"enum": list(Api), "default": Api.CHAT_COMPLETIONS}},
    body={
        "type": "object",
        "required": ["model"],
        "properties": {"model": {"type": "string", "minLength": 1}},
    },
)
async def explain(request: web.Request) -> web.Response:
    """`POST /admin/explain?path=...`: where a body would go now. Raises `ApiError` as the request would."""
    context = request.config_dict[CONTEXT]
    api = _api(request.query.get("path", Api.CHAT_COMPLETIONS))
    body = await _body(request, context.config().scheduler.max_body_bytes)
    parsed = await asyncio.to_thread(parse, api, body)  # which takes a tenth of a second for 64 MB
    receipt = context.router.explain(parsed, context.clock())
    return json_answer(_report(receipt, _unix_offset_s(context)))


def _limit(text: str) -> int:
    limit = int(text) if _LIMIT.fullmatch(text) else 0
    if not 1 <= limit <= _MOST_LISTED:
        message = f"`limit` must be a number from 1 to {_MOST_LISTED}."
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="limit")
    return limit


def _api(path: str) -> Api:
    api = Api.from_path(path)
    if api is None:
        message = f"`path` must be one of {', '.join(Api)}."
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param="path")
    return api


async def _body(request: web.Request, most_bytes: int) -> bytes:
    """The body, which may come compressed. Raises `HTTPRequestEntityTooLarge` too."""
    try:
        return await request.clone(client_max_size=most_bytes).read()
    except web.RequestPayloadError:
        message = "The body cannot be read: it is not what its content-encoding says."
        raise ApiError(ErrorCode.INVALID_REQUEST, message) from None


def _unix_offset_s(context: AdminContext) -> float:
    """What the router's clock lacks to Unix time."""
    return time.time() - context.clock()


def _report(receipt: Receipt, unix_offset_s: float) -> DecisionReport:
    report = DecisionReport(
        request_id=receipt.request_id or None,
        exchange_id=receipt.exchange_id or None,
        decided_at=round(receipt.decided_s + unix_offset_s, 3),
        model=receipt.model,
        policy=receipt.policy,
        prompt_tokens=round(receipt.prompt_tokens),
        expected_output_tokens=round(receipt.output_tokens),
        waits=receipt.waits,
        waited_s=round(receipt.waited_s, _DIGITS),
        pinned=receipt.pinned,
        equally_cheap=receipt.equals,
        predicted_ttft_s=round(receipt.predicted_s, _DIGITS),
        candidates=[_candidate(receipt, candidate) for candidate in receipt.candidates()],
        fallbacks=[node.id for node in receipt.fallbacks],
        excluded=[NodeReason(node.id, reason) for node, reason in receipt.excluded],
        more_excluded=receipt.more_excluded,
        failed_attempts=[NodeReason(node_id, reason) for node_id, reason in receipt.failed],
        prefill=None if receipt.prefill is None else _prefill(receipt.prefill),
        outcome=receipt.outcome,
    )
    return msgspec.structs.replace(report, why=headline(report))


def _prefill(terms: SplitTerms) -> PrefillReport:
    return PrefillReport(
        node=terms.node.id,
        uncached_tokens=round(terms.uncached_tokens),
        wait_s=round(terms.wait_s, _DIGITS),
        prefill_s=round(terms.prefill_s, _DIGITS),
        transfer_s=round(terms.transfer_s, _DIGITS),
        saved_s=round(terms.saved_s, _DIGITS),
        delay_s=round(terms.delay_s, _DIGITS),
        took_s=None if terms.took_s is None else round(terms.took_s, _DIGITS),
        failure=terms.failure,
    )


def _candidate(receipt: Receipt, candidate: Candidate) -> CandidateReport:
    node = candidate.node
    return CandidateReport(
        node=node.id,
        hardware=node.config.hardware,
        role=_role(receipt, node),
        weight=node.config.weight,
        cost_s=round(candidate.cost_s, _DIGITS),
        terms_s={term.name.lower(): round(value, _DIGITS) for term, value in candidate.terms_s.items()},
        matched_tokens=candidate.matched_tokens,
        put_back=candidate.put_back,
    )


def _role(receipt: Receipt, node: Node) -> Role | None:
    if node is receipt.nodes[0]:
        return Role.CHOSEN
    return Role.FALLBACK if any(node is fallback for fallback in receipt.fallbacks) else None
