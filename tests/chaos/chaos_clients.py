"""Clients that ask as planned, check what they get, and note how each request ended."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from chaos_answers import BrokenError, Expected, GarbledError, check_stream, check_whole
from chaos_ledger import End, Exchange
from chaos_schedule import DOCUMENTS, LONGEST_BYTES, Api, Ask

from extproc import headers
from extproc.simulator import tokens

PATIENCE_S = 90.0
"""Far over `request_timeout_ms`: who waited so long got no answer."""
_BACK_OFF_S = 1.0
"""A client that is behind its plan would knock at a closed door all the time."""
_SYSTEM = "You are a patient assistant. "
_DOCUMENT_BYTES = 4096


class Prompts:
    """Prompts cut out of one long text, so that many begin alike; each ends with its request's id."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"text {seed}")
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(2000)]
        size = LONGEST_BYTES + DOCUMENTS * _DOCUMENT_BYTES
        self._text = " ".join(rng.choices(words, k=size // 8))

    def body(self, ask: Ask) -> tuple[bytes, Expected]:
        """The body of a request, and what its answer must be."""
        start = ask.document * _DOCUMENT_BYTES
        text = f"{self._text[start : start + ask.prompt_bytes]} {ask.id}"
        body: dict[str, Any] = {"model": ask.model, "max_tokens": ask.max_tokens, "stream": ask.stream}
        if ask.api is Api.CHAT:
            messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
            body["messages"] = messages
            prompt = tokens.encode_chat(msgspec.convert(messages, list[tokens.Message]))
        else:
            body["prompt"] = text
            prompt = tokens.encode(text)
        if ask.stream:
            body["stream_options"] = {"include_usage": ask.include_usage}
        if ask.priority is not None:
            body["x-inferact"] = {"priority": ask.priority}
        return msgspec.json.encode(body), Expected(ask, tokens.count(prompt))


class Clients:
    """All clients of a run, which tell `note` of each request; `clock` tells the seconds since the start."""

    def __init__(
        self, url: str, seed: int, clock: Callable[[], float], note: Callable[[Exchange], None]
    ) -> None:
        self.sent = 0
        self.waiting = 0
        self._url = url
        self._prompts = Prompts(seed)
        self._clock = clock
        self._note = note

    async def run(self, plans: Sequence[Sequence[Ask]]) -> None:
        """One client a plan; returns when all have come to their end."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as clients,
        ):
            for plan in plans:
                clients.create_task(self._client(session, plan))

    async def _client(self, session: aiohttp.ClientSession, plan: Sequence[Ask]) -> None:
        for ask in plan:
            await asyncio.sleep(max(0.0, ask.at_s - self._clock()))
            self.sent += 1
            self.waiting += 1
            exchange = await self._exchange(session, ask)
            self._note(exchange)
            self.waiting -= 1
            if exchange.end is End.NO_ANSWER:
                await asyncio.sleep(_BACK_OFF_S)

    async def _exchange(self, session: aiohttp.ClientSession, ask: Ask) -> Exchange:
        body, expected = self._prompts.body(ask)
        exchange = Exchange(ask, self._clock())
        try:
            async with asyncio.timeout(ask.leaves_after_s):
                await self._ask(session, expected, body, exchange)
        except aiohttp.ClientError as error:
            exchange.fail(End.CUT if exchange.status else End.NO_ANSWER, repr(error))
        except TimeoutError:
            patient = ask.leaves_after_s is None
            exchange.fail(End.NO_ANSWER if patient else End.LEFT, "the client left")
        except BrokenError as error:
            exchange.fail(End.CUT, str(error))
        except GarbledError as error:
            exchange.fail(End.GARBLED, str(error))
        exchange.ended_s = self._clock()
        return exchange

    async def _ask(
        self, session: aiohttp.ClientSession, expected: Expected, body: bytes, exchange: Exchange
    ) -> None:
        ask = expected.ask
        sent = {"content-type": "application/json", "x-request-id": ask.id}
        async with session.post(self._url + ask.api, data=body, headers=sent) as answer:
            exchange.status = answer.status
            exchange.node = answer.headers.get(headers.NODE, "")
            exchange.attempts = int(answer.headers.get(headers.ATTEMPTS, "0"))
            exchange.reason = answer.headers.get(headers.REASON, "")
            exchange.retry_after = "retry-after" in answer.headers
            if ask.stream and answer.status == 200:
                check_stream(expected, exchange.node, await _all_that_comes(answer))
                return
            whole = await answer.read()
            if answer.status != 200:
                exchange.fail(End.REFUSED, whole[:300].decode(errors="replace"))
            elif answer.headers.get("x-sim-node") != exchange.node:
                raise GarbledError(
                    f"an answer of {answer.headers.get('x-sim-node')} as if of {exchange.node}"
                )
            else:
                check_whole(expected, exchange.node, whole)


async def _all_that_comes(answer: aiohttp.ClientResponse) -> bytes:
    """A stream to its end, or as far as it came: how far tells how it broke. Raises `BrokenError`."""
    body = bytearray()
    try:
        async for part in answer.content.iter_any():
            body += part
    except aiohttp.ClientError as error:
        raise BrokenError(f"a stream cut after {len(body)} bytes: {error!r}") from error
    return bytes(body)
