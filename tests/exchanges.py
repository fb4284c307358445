"""Exchanges to test with: Envoy's messages as it would send them, replies as it reads them, no sockets."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from prometheus_client.parser import text_string_to_metric_families

from extproc.config import Config
from extproc.exchange import Exchange, Limits, Phase
from extproc.routing.admission import Admission
from extproc.routing.node import Health, Node
from extproc.routing.router import Router
from extproc.telemetry import Telemetry

CHAT = "/v1/chat/completions"
MODEL = "llama-8b"
TIMEOUT_S = 30.0
MAX_BODY_BYTES = 8 << 20
FASTEST_FIRST = ("h100-80g", "a100-80g", "a100-40g", "rtx-4090", "a6000")
"""Hardware that makes the pick and its fallbacks come in the order of the nodes."""


@dataclass
class Bench:
    """The parts around an exchange, all real: nodes that get picked in their order, queue and metrics."""

    names: tuple[str, ...] = ("a", "b", "c")
    cap: int | None = None
    max_waiting: int = 100
    max_waiting_bytes: int = 1 << 20
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = [
            {
                "id": name,
                "hardware": hardware,
                "backend": "vllm",
                "endpoint": "http://10.0.0.1:8000",
                "models": [MODEL],
                **self.settings,
            }
            for name, hardware in zip(self.names, FASTEST_FIRST, strict=False)
        ]
        config = Config.model_validate({"nodes": nodes})
        self.nodes = {
            node.id: Node(config=node, profile=node.profile, health=Health.HEALTHY) for node in config.nodes
        }
        self.router = Router(self.nodes.values(), self.cap, random.Random(1))
        self.admission = Admission(self.router, self.max_waiting, self.max_waiting_bytes)
        self.telemetry = Telemetry(self.router, self.admission)

    def exchange(self, timeout_s: float = TIMEOUT_S) -> Exchange:
        """A new exchange, which has seen nothing yet."""
        return Exchange(self.admission, self.telemetry, Limits(timeout_s, MAX_BODY_BYTES))

    def sent(self, now_s: float = 0.0, **members: Any) -> Exchange:
        """An exchange that has got its headers and a body, at the same time."""
        exchange = self.exchange()
        exchange.receive(headers_message(), now_s)
        exchange.receive(body_message(chat_body(**members)), now_s)
        return exchange

    def running(self, **members: Any) -> Exchange:
        """An exchange whose request is on a node."""
        exchange = self.sent(**members)
        assert exchange.decision is not None
        return exchange

    def queued(self, now_s: float = 0.0, **members: Any) -> Exchange:
        """An exchange whose request waits."""
        exchange = self.sent(now_s, **members)
        assert exchange.phase is Phase.QUEUED
        return exchange

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests on each node that has any."""
        return {name: node.in_flight for name, node in self.nodes.items() if node.in_flight}

    def is_idle(self, now_s: float) -> bool:
        """Whether nothing at all is booked on any node, to the last bit."""
        return not any(
            load.requests or load.tokens or load.context_tokens or load.busy_until_s > now_s
            for load in self.router.loads.on
        )

    def metrics(self, name: str) -> dict[tuple[str, ...], float]:
        """What was counted, without what is still zero: values of the labels, in their order -> value."""
        families = text_string_to_metric_families(self.telemetry.render().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for sample in samples
            if sample.value
        }


def chat_body(**members: Any) -> bytes:
    """A chat request's body."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **members}).encode()


def headers_message(path: str = CHAT, end: bool = False, **more: str) -> bytes:
    """Request headers as Envoy sends them; in the names of `more` an underscore is a hyphen."""
    values = {":method": "POST", ":path": path, "x-request-id": "req-1"}
    values |= {name.replace("_", "-"): value for name, value in more.items()}
    pairs = [HeaderValue(key=name, raw_value=value.encode()) for name, value in values.items()]
    headers = HttpHeaders(headers=HeaderMap(headers=pairs), end_of_stream=end)
    return bytes(ProcessingRequest(request_headers=headers).SerializeToString())


def body_message(body: bytes, end: bool = True) -> bytes:
    """The buffered request body."""
    return bytes(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end)).SerializeToString())


ANSWER_MESSAGES = {
    "response_headers": ProcessingRequest(response_headers=HttpHeaders()).SerializeToString(),
    "response_body": ProcessingRequest(response_body=HttpBody(body=b"{}")).SerializeToString(),
    "request_trailers": ProcessingRequest(request_trailers=HttpTrailers()).SerializeToString(),
    "response_trailers": ProcessingRequest(response_trailers=HttpTrailers()).SerializeToString(),
}
"""What an Envoy that is set up for it sends after the body."""


def reply_of(reply: bytes | None) -> ProcessingResponse:
    """A reply as Envoy reads it."""
    assert reply is not None
    return ProcessingResponse.FromString(reply)


def opened(bench: Bench, now_s: float = 0.0, **headers: Any) -> Exchange:
    """An exchange that waits for its body."""
    exchange = bench.exchange()
    exchange.receive(headers_message(**headers), now_s)
    return exchange


def routed(reply: bytes | None) -> tuple[dict[str, str], bytes | None]:
    """The headers that a routing reply sets, and the body if it replaces it."""
    message = reply_of(reply)
    assert message.WhichOneof("response") == "request_body"
    common = message.request_body.response
    assert common.clear_route_cache, "else the route that was chosen before stands"
    assert not common.header_mutation.remove_headers
    options = common.header_mutation.set_headers
    for option in options:
        assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert not option.header.value, "raw_value is the one that Envoy takes as it is"
    values = {option.header.key: option.header.raw_value.decode() for option in options}
    assert len(values) == len(options)
    changed = common.HasField("body_mutation")
    return values, common.body_mutation.body if changed else None


def refused(reply: bytes | None) -> tuple[int, str, dict[str, str]]:
    """Status, `error.code` and headers of an answer to the client."""
    message = reply_of(reply)
    assert message.WhichOneof("response") == "immediate_response"
    answer = message.immediate_response
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.details == f"inferact_{error['code']}"
    headers = {}
    for option in answer.headers.set_headers:
        assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        headers[option.header.key] = option.header.raw_value.decode()
    assert headers["content-type"] == "application/json"
    assert headers["x-inferact-reason"] == error["code"]
    return answer.status.code, error["code"], headers
