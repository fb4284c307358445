"""How engines hand the KV of a prompt over: what a prefill node is asked, and what its decode node is told.

vLLM (NixlConnector): the prefill node answers one token and the parameters of the transfer, and keeps the KV
for a while. The decode node fetches it. It may do so once: afterwards the memory belongs to other prompts,
and an engine that fetches from it would go on with those, or fail.

SGLang: both get the whole request at once with the same random room, in which they find each other.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from extproc.config import NodeConfig, Protocol
from extproc.exchange import Transfer
from extproc.openai.cut import cut
from extproc.openai.request import Api

BOOTSTRAP_PORT: Final = 8998
"""Where prefill nodes of SGLang's wait for decode nodes (`--disaggregation-bootstrap-port`)."""

_PARAMETERS: Final = "kv_transfer_params"
_CAPPED: Final = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "min_tokens"),
    *("stream", "stream_options"),
)
_ONE_TOKEN: Final = b'"max_tokens":1,"stream":false'
_ONE_TOKEN_OF_CHAT: Final = b'"max_completion_tokens":1,' + _ONE_TOKEN
_ABOUT_PROMPTS: Final = frozenset({"echo", "prompt_logprobs", "use_beam_search"})
"""Members that ask for what only an engine that computes the prompt itself can do."""
_OFF: Final = (b"false", b"null")


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Raw] | None = None
    usage: Raw = Raw(b"null")


_ANSWER: Final = msgspec.json.Decoder(_Answer)


@dataclass(slots=True, frozen=True)
class Handover:
    """The parameters for the prefill node, and those for the decode node as far as they are known before."""

    members: bytes
    transfer: Transfer | None


def handover(protocol: Protocol, prefill: NodeConfig) -> Handover:
    """A new one, from this node to any other that speaks the protocol."""
    if protocol is Protocol.VLLM:
        return Handover(b'"kv_transfer_params":{"do_remote_decode":true}', None)
    room = secrets.randbits(63)
    host = msgspec.json.encode(prefill.host)
    members = b'"bootstrap_host":%b,"bootstrap_port":%d,"bootstrap_room":%d' % (host, BOOTSTRAP_PORT, room)
    return Handover(members, Transfer(members, once=False))


def can_be_split(members: Sequence[tuple[str, Raw]]) -> bool:
    """Whether a decode node can answer the request without having computed the prompt."""
    return all(name not in _ABOUT_PROMPTS or bytes(value) in _OFF for name, value in members)


def leg_body(body: bytes, members: Sequence[tuple[str, Raw]], path: str, given: Handover) -> bytes:
    """The body for the prefill node: one token, in one piece."""
    one_token = _ONE_TOKEN_OF_CHAT if path == Api.CHAT_COMPLETIONS else _ONE_TOKEN
    return cut(body, members, also=_CAPPED, first=b",".join((given.members, one_token)))


def read_answer(answer: bytes) -> tuple[Transfer | None, bytes]:
    """The parameters in a prefill node's answer (`None`: there are none), and its `usage`."""
    try:
        read = _ANSWER.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return None, b""
    if not read.kv_transfer_params:
        return None, bytes(read.usage)
    members = b'"%b":%b' % (_PARAMETERS.encode(), msgspec.json.encode(read.kv_transfer_params))
    return Transfer(members, once=True), bytes(read.usage)
