"""Learns the tokens of prompts, beside their requests: the engines with KV events are asked to tokenize them.

A request never waits for it. Where prompts come faster than they are learned, some are not.
"""

import asyncio
import contextlib
import logging
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import aiohttp
import msgspec
from msgspec import Meta

from extproc.engines.client import EngineClient, NoAnswerError, open_session
from extproc.exchange import OnRouted
from extproc.openai.request import Api, RoutingRequest
from extproc.routing.blocks import PromptBlocks
from extproc.routing.exact import ExactCaches, Tokens
from extproc.routing.node import Node
from extproc.routing.router import Decision

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 128 << 10
"""Longer prompts are not learned: what comes back takes a millisecond to read."""
MAX_WAITING: Final = 32
"""Prompts that wait to be learned; more are not taken."""
_WORKERS: Final = 4
_TIMEOUT_S: Final = 5.0
_MODELS_KEPT_S: Final = 60.0
_LEARNED: Final = frozenset({Api.CHAT_COMPLETIONS, Api.COMPLETIONS})
_ASKED: Final = frozenset(
    (
        *("model", "messages", "prompt", "tools", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template", "chat_template_kwargs"),
    )
)
"""Members of a request that `/tokenize` knows: those that shape its tokens."""
# An engine would fetch them once more; and their tokens are not all that its blocks depend on.
_MEDIA: Final = re.compile(rb'"(?:(?:image|video|audio|file)_(?:url|embeds|pil|id|data)|input_audio|file)"')


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_BODY: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOKENIZED: Final = msgspec.json.Decoder(_Tokenized)
_MODELS: Final = msgspec.json.Decoder(_Models)
_SALT: Final = msgspec.json.Decoder(str | None)


@dataclass(slots=True, frozen=True)
class _Prompt:
    node: Node
    model: str
    """As the engine calls it."""
    blocks: PromptBlocks
    salt: bytes
    body: bytes


class Learner:
    """Tells `exact` the tokens of prompts that are sent to nodes with KV events."""

    def __init__(
        self, nodes: Iterable[Node], exact: ExactCaches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = _publishing(nodes)
        self._exact = exact
        self._clock = clock
        self._waiting: deque[_Prompt] = deque()
        self._work = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, EngineClient] = {}
        self._adapters: dict[str, tuple[float, frozenset[str]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def on_routed(self) -> OnRouted | None:
        """What to call with each decision; `None`: nothing is to be learned."""
        return self._routed if self._nodes else None

    def _routed(self, decision: Decision, request: RoutingRequest, body: bytes) -> None:
        """Note a prompt that is worth learning."""
        if len(body) > MAX_BODY_BYTES or len(self._waiting) >= MAX_WAITING or request.api not in _LEARNED:
            return
        node, blocks = decision.node, decision.blocks
        if self._exact.wants(node, blocks):
            model = node.config.engine_model(request.model)
            self._waiting.append(_Prompt(node, model, blocks, bytes(request.prompt.cache_salt), body))
            self._work.set()

    async def start(self) -> None:
        """Begin to learn."""
        self.set_nodes(self._nodes)

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Learn for these from now on; `on_routed` may be another afterwards."""
        self._nodes = _publishing(nodes)
        self._adapters.clear()
        if self._nodes and self._session is None:
            self._session = open_session()
        if (session := self._session) is not None:
            self._clients = {node.id: EngineClient(session, node.config) for node in self._nodes}
        if self._nodes and not self._tasks:
            self._tasks = [asyncio.create_task(self._run(), name="learn prompts") for _ in range(_WORKERS)]

    async def stop(self) -> None:
        """Stop; harmless when repeated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                self._work.clear()
                await self._work.wait()
                continue
            prompt = self._waiting.popleft()
            try:
                await self._learn(prompt)
            except (NoAnswerError, msgspec.DecodeError) as error:
                why = str(error) if isinstance(error, NoAnswerError) else "its answer cannot be read"
                logger.debug("node %s did not tokenize a prompt: %s", prompt.node.id, why)
            except Exception:
                logger.exception("a prompt could not be learned; learning goes on")

    async def _learn(self, prompt: _Prompt) -> None:
        if _MEDIA.search(prompt.body) or not self._exact.wants(prompt.node, prompt.blocks):
            return
        client = self._clients[prompt.node.id]
        is_adapter = await self._is_adapter(client, prompt)
        asked = {name: value for name, value in _BODY.decode(prompt.body).items() if name in _ASKED}
        answer = await client.post("/tokenize", msgspec.json.encode(asked), _TIMEOUT_S)
        ids = array("I", _TOKENIZED.decode(answer).tokens)
        await asyncio.sleep(0)  # that may have taken a millisecond
        salt = _SALT.decode(prompt.salt)
        self._exact.learn(
            prompt.model, prompt.blocks, Tokens(ids, salt, prompt.model if is_adapter else None)
        )

    async def _is_adapter(self, client: EngineClient, prompt: _Prompt) -> bool:
        """Whether the model is a LoRA, by whose name its blocks differ: it has a parent."""
        since_s, adapters = self._adapters.get(prompt.node.id, (None, frozenset()))
        if since_s is None or self._clock() - since_s > _MODELS_KEPT_S:
            adapters = frozenset()
            with contextlib.suppress(msgspec.DecodeError):
                models = _MODELS.decode(await client.get("/v1/models", _TIMEOUT_S)).data
                adapters = frozenset(model.id for model in models if model.parent is not None)
            self._adapters[prompt.node.id] = self._clock(), adapters
        return prompt.model in adapters


def _publishing(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.config.kv_events is not None]
