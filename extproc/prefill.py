"""The prefill legs of split requests: each is posted to its node while Envoy holds the request."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

import aiohttp

from extproc.engines.backends import dialect_for
from extproc.engines.client import EngineClient, NoAnswerError, open_session
from extproc.engines.handover import Handover, can_be_split, handover, leg_body, read_answer
from extproc.engines.signatures import failure_of
from extproc.exchange import Exchange, PrefillLeg
from extproc.headers import RETRIED_STATUS
from extproc.openai.errors import ApiError
from extproc.openai.members import members
from extproc.openai.usage import read_usage
from extproc.routing.node import Node
from extproc.routing.outcome import Attempt, Failure, LegFailure
from extproc.telemetry import Telemetry

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 4.0
"""Idle connections are closed before uvicorn does it (5 s): no prompt meets a dying one."""


class Judge(Protocol):
    """Who keeps the health of nodes by what requests tell of them."""

    def leg_served(self, key: str, node: Node) -> None:
        """A prefill node has done what it was asked."""

    def leg_failed(self, attempt: Attempt) -> None:
        """It has not."""


class Prefiller:
    """Sends prefill legs. `start` and `stop` it; `begin` is a `StartLeg`."""

    def __init__(
        self,
        nodes: Iterable[Node],
        telemetry: Telemetry,
        judge: Judge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = tuple(nodes)
        self._telemetry = telemetry
        self._judge = judge
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, EngineClient] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._silent: set[str] = set()

    async def start(self) -> None:
        """Legs may begin from now on."""
        self._session = open_session(_KEEP_ALIVE_S)
        self.set_nodes(self._nodes)

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Legs go to these from now on; those that run go on."""
        assert self._session is not None, "started"
        session = self._session
        self._clients = {node.id: EngineClient(session, node.config) for node in nodes}
        self._silent.clear()

    async def stop(self) -> None:
        """Cancel what runs; harmless when repeated."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def begin(self, leg: PrefillLeg, exchange: Exchange) -> Callable[[], object]:
        """Send a leg; gives what cancels it."""
        task = asyncio.create_task(self._run(leg, exchange), name=f"prefill {leg.key}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task.cancel

    async def _run(self, leg: PrefillLeg, exchange: Exchange) -> None:
        """One leg, and what becomes of it; cancelled where nobody waits for it any more."""
        try:
            listed = members(leg.body)
        except ApiError:  # too many to add one
            listed = []
        if not listed or not can_be_split(listed):
            self._over(leg, exchange, 0.0, LegFailure.UNSUPPORTED)
            exchange.go_on(None)
            return
        given = handover(leg.protocol, leg.node.config)
        body = leg_body(leg.body, listed, leg.path, given)
        del listed  # which keeps the body alive
        if given.transfer is not None:
            exchange.go_on(given.transfer)
        await self._post(leg, body, given, exchange)

    async def _post(self, leg: PrefillLeg, body: bytes, given: Handover, exchange: Exchange) -> None:
        began_s = self._clock()
        self._telemetry.prefill_sent(leg.node.id)
        failure, status, answer = None, 0, b""
        try:
            status, answer = await self._clients[leg.node.id].answer(leg.path, body, leg.timeout_s)
        except NoAnswerError as error:
            failure = LegFailure(error.failure.value)
        except KeyError:  # a reload took the node while the request was in the queue
            failure = LegFailure.UNSUPPORTED
        if failure is None and not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            failure = _failure_of(leg.node, status, answer)
        took_s = self._clock() - began_s
        transfer, usage = read_answer(answer) if failure is None else (None, b"")
        transfer = transfer or given.transfer
        if failure is None and transfer is None:
            failure = LegFailure.NO_PARAMETERS
            self._warn(leg.node)
        if failure is None:
            self._telemetry.prefilled(leg.node, took_s, read_usage(usage))
            self._judge.leg_served(leg.key, leg.node)
        elif (fault := failure.fault) is not None:
            reason = str(status) if status else _FLAGS.get(fault, fault.value)
            self._judge.leg_failed(Attempt(leg.key, leg.node.id, fault, reason, took_s))
        self._over(leg, exchange, took_s, failure)
        if given.transfer is None:
            exchange.go_on(transfer if failure is None else None)

    def _over(self, leg: PrefillLeg, exchange: Exchange, took_s: float, failure: LegFailure | None) -> None:
        if failure is not None:
            self._telemetry.prefill_failed(leg.node.id, failure)
            logger.debug("the prefill leg of request %.80r failed: %s", exchange.request_id, failure)
        exchange.leg_over(took_s, failure, self._clock())

    def _warn(self, node: Node) -> None:
        """Once a node, and again after a reload."""
        if node.id not in self._silent:
            self._silent.add(node.id)
            logger.warning(
                "node %s answers a prefill without `kv_transfer_params`: start the engine with "
                "--kv-transfer-config, or set its role to decode",
                node.id,
            )


_FLAGS: Final = {
    Failure.UNREACHED: "upstream_connection_failure",
    Failure.LOST: "upstream_connection_termination",
    Failure.TIMED_OUT: "upstream_request_timeout",
}
"""The same reasons as those of Envoy's attempts."""


def _failure_of(node: Node, status: int, answer: bytes) -> LegFailure:
    """What a failing answer says. A prompt that the engine refuses is no failure of the node's."""
    if status not in RETRIED_STATUS and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return LegFailure.REFUSED
    failure = failure_of(dialect_for(node.config).signatures, status, answer)
    return LegFailure((failure or Failure.ERROR).value)
