"""Asks an engine what it is, serves and tells, before any client depends on it.

Beside questions it sends each node one short prompt, twice: the first makes an engine publish KV events, and
the second finds the prompt cached, which its answer may tell.
"""

import asyncio
import secrets
from typing import Annotated, Final

import aiohttp
import msgspec
import zmq
from msgspec import Meta, Raw

from extproc.config.node import KvEvents, NodeConfig
from extproc.engines.backends import dialect_for
from extproc.engines.client import EngineClient, NoAnswerError
from extproc.engines.dialect import Dialect, read_report
from extproc.engines.kvsockets import KvSockets
from extproc.openai.usage import read_usage
from extproc.routing.node import EngineReport

_ASK_S: Final = 5.0
_ANSWER_S: Final = 60.0
_EVENTS_S: Final = 1.0
_MORE_PROMPTS: Final = 2
"""Sent where no event came: those of the first may have been published before we were listening."""
_LOOK_S: Final = 0.05
_PROMPT_WORDS: Final = 400
"""Enough tokens for several blocks of any engine's, and within any context."""
_LONGEST_NAME: Final = 200


class _Model(msgspec.Struct):
    id: Annotated[str, Meta(max_length=_LONGEST_NAME)]


class _Models(msgspec.Struct):
    data: list[_Model]


class NodeProbe(msgspec.Struct, kw_only=True):
    """What a node answered; `None` is unknown. `error`: why it does not answer."""

    node: str
    engine: str
    error: str | None = None
    version: str | None = None
    serves: list[str] | None = None
    not_served: list[str] = msgspec.field(default_factory=list)
    """Models that the configuration names, by the engine's names, and that the engine has not."""
    has_metrics: bool | None = None
    kv_capacity_tokens: int | None = None
    tells_cached_tokens: bool | None = None
    caches_prefixes: bool | None = None
    kv_events: bool | None = None
    advice: list[str] = msgspec.field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether it answers, and serves what it is to serve."""
        return self.error is None and not self.not_served


async def probe(session: aiohttp.ClientSession, config: NodeConfig) -> NodeProbe:
    """Ask a node everything. Never raises for what an engine does."""
    asking = _Asking(EngineClient(session, config), config, dialect_for(config))
    try:
        await asking.client.get(asking.dialect.health_path, _ASK_S)
    except NoAnswerError as error:
        asking.found.error = str(error)
        return asking.found
    await asking.version()
    await asking.models()
    with _Listener(config.kv_events) as listener:
        await asking.cached_tokens()
        await asking.kv_events(listener)
    return asking.found


class _Asking:
    """The questions to one node, and what came of them."""

    def __init__(self, client: EngineClient, config: NodeConfig, dialect: Dialect) -> None:
        self.client = client
        self.config = config
        self.dialect = dialect
        self.found = NodeProbe(node=config.id, engine=dialect.engine)

    async def version(self) -> None:
        """What release it is."""
        if self.dialect.version_path is not None:
            members = _members(await self._get(self.dialect.version_path))
            self.found.version = _text(members.get(self.dialect.version_member))

    async def models(self) -> None:
        """Whether it has the models that the configuration says it has."""
        try:
            listed = msgspec.json.decode(await self._get("/v1/models"), type=_Models)
        except msgspec.DecodeError:
            return
        self.found.serves = [model.id for model in listed.data]
        wanted = sorted(set(map(self.config.engine_model, self.config.serves)))
        missing = [name for name in wanted if name not in self.found.serves]
        if not missing:
            return
        have, want = ", ".join(self.found.serves) or "none", ", ".join(missing)
        if self.dialect.takes_any_model:
            self._advise(
                f"it calls its model {have}, not {want}, and answers to any name: is it the right one?"
            )
        else:
            self.found.not_served = missing
            self._advise(f"it serves {have}, not {want}: correct `models`, or name it in `model_aliases`")

    async def cached_tokens(self) -> None:
        """Whether answers tell how much of a prompt was cached, and whether any was."""
        before = await self._report()
        self.found.has_metrics = None if self.dialect.metrics_path is None else before is not None
        self.found.kv_capacity_tokens = before.kv_capacity_tokens if before else None
        if before is None and self.dialect.metrics_option:
            self._advise(f"it has no metrics: start it with {self.dialect.metrics_option}")
        body = self._prompt()
        answers = [_members(await self._post("/v1/completions", body)) for _ in range(2)]
        if not all("usage" in answer for answer in answers):
            return
        usages = [read_usage(answer["usage"]) for answer in answers]
        told = [usage.cached_tokens for usage in usages if usage is not None]
        self.found.tells_cached_tokens = any(cached is not None for cached in told)
        after = await self._report()
        self.found.caches_prefixes = _were_cached(told, before, after)
        self._advise_on_cache()

    def _advise_on_cache(self) -> None:
        if self.found.caches_prefixes is False:
            on = f": start it with {option}" if (option := self.dialect.caching_option) else ""
            self._advise(f"it did not find a prompt again that it had a moment ago{on}")
        elif not self.found.tells_cached_tokens and self.dialect.usage_option:
            self._advise(
                f"start it with {self.dialect.usage_option}: answers then tell what was cached of a prompt"
            )

    async def kv_events(self, listener: "_Listener") -> None:
        """Whether events come from where the configuration says; else whether there are any."""
        if self.config.kv_events is not None:
            self.found.kv_events = await self._hears(listener)
            if not self.found.kv_events:
                self._advise(
                    "no KV event came from `kv_events.endpoint`: "
                    "the engine listens where its --kv-events-config says tcp://*:PORT"
                )
        elif self.dialect.kv_events_path is not None:
            answer = await self._get(self.dialect.kv_events_path)
            self.found.kv_events = bool(_members(answer)) if answer else None
            if self.found.kv_events:
                self._advise(
                    "it publishes KV events: name where in `kv_events`, and its cache is known exactly"
                )
            else:
                self._advise(
                    "with --kv-events-config, and `kv_events` here, its cache would be known exactly"
                )

    async def _hears(self, listener: "_Listener") -> bool:
        heard = await listener.heard()
        for _ in range(_MORE_PROMPTS):
            if not heard:
                await self._post("/v1/completions", self._prompt())
                heard = await listener.heard()
        return heard

    def _prompt(self) -> bytes:
        """A request that no engine has seen before."""
        text = f"{secrets.token_hex(8)} " + "inferact asks " * (_PROMPT_WORDS // 2)
        model = self.config.engine_model(self.config.models[0])
        return msgspec.json.encode({"model": model, "prompt": text, "max_tokens": 1})

    async def _report(self) -> EngineReport | None:
        if self.dialect.metrics_path is None:
            return None
        report = read_report(self.dialect, await self._get(self.dialect.metrics_path), 0.0)
        return None if report == EngineReport(0.0) else report

    async def _get(self, path: str) -> bytes:
        """Empty where it does not answer."""
        try:
            return await self.client.get(path, _ASK_S)
        except NoAnswerError:
            return b""

    async def _post(self, path: str, body: bytes) -> bytes:
        try:
            return await self.client.post(path, body, _ANSWER_S)
        except NoAnswerError:
            return b""

    def _advise(self, text: str) -> None:
        self.found.advice.append(text)


class _Listener:
    """Hears whether an engine publishes KV events, if it is known where."""

    def __init__(self, events: KvEvents | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context() if events else None
        self._sockets = KvSockets(self._context, events) if self._context and events else None

    def __enter__(self) -> "_Listener":
        return self

    def __exit__(self, *_: object) -> None:
        if self._sockets is not None and self._context is not None:
            self._sockets.close()
            self._context.destroy(linger=0)

    async def heard(self) -> bool:
        """Whether anything came, by now or within seconds."""
        for _ in range(round(_EVENTS_S / _LOOK_S)):
            if self._sockets is not None and self._sockets.receive() is not None:
                return True
            await asyncio.sleep(_LOOK_S)
        return False


def _were_cached(
    told: list[int | None], before: EngineReport | None, after: EngineReport | None
) -> bool | None:
    """Whether the prompt was found, by the answers or else by the engine's counters."""
    if any(told):
        return True
    if before is None or after is None or before.prefix_hits is None or after.prefix_hits is None:
        return None
    return after.prefix_hits > before.prefix_hits


def _members(text: bytes) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _text(value: Raw | None) -> str | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=str)[:_LONGEST_NAME]
    except msgspec.DecodeError:
        return None
