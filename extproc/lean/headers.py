"""Header blocks: those that come, decoded once each, and the few that are sent, ready made (RFC 7541)."""

from typing import Final
from urllib.parse import quote

from hpack import Decoder, HPACKError

from extproc.lean.frames import Code, PeerError

LARGEST_BLOCK: Final = 16_384
"""Bytes of a block, and of its headers together (with 32 a header, as RFC 7541, 4.1, counts)."""
RESPONSE: Final = b"\x88\x0f\x10\x10application/grpc"
"""`:status: 200` and the content-type; nothing that is sent uses a dynamic table."""
_KNOWN: Final = 64
"""Blocks kept decoded: Envoy sends one for each kind of stream, over and over."""
_LONGEST_MESSAGE: Final = 100
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_PSEUDO: Final = _NEEDED | {b":authority"}


def trailers(status: int, message: str = "") -> bytes:
    """The block that ends an answer, with gRPC's status."""
    said = quote(message[:_LONGEST_MESSAGE], safe=" ()`'/:;,.").encode()[:_LONGEST_MESSAGE]
    return _literal(b"grpc-status", b"%d" % status) + (_literal(b"grpc-message", said) if said else b"")


class HeaderReader:
    """Decodes one connection's header blocks, in the order in which they come."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=LARGEST_BLOCK)
        self._known: dict[bytes, str] | None = None
        """Paths by blocks; `None` while a block may mean what earlier ones made it mean."""

    def without_table(self) -> None:
        """The peer knows that the dynamic table has no room: from now on a block always means the same."""
        self._decoder.max_allowed_table_size = 0
        self._known = {}

    def path(self, block: bytes) -> str:
        """The path of a request. Raises `PeerError`."""
        if self._known is None:
            return _path(self.decode(block))
        path = self._known.get(block)
        if path is None:
            path = _path(self.decode(block))
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[block] = path
        return path

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Every header. Raises `PeerError`."""
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except (HPACKError, IndexError) as error:
            raise PeerError(Code.COMPRESSION_ERROR, "a header block that cannot be decoded") from error


def _path(headers: list[tuple[bytes, bytes]]) -> str:
    """RFC 9113, 8.2 and 8.3: pseudo-headers come first, and once; names are in small letters."""
    pseudo = [name for name, _ in headers if name.startswith(b":")]
    first = [name for name, _ in headers[: len(pseudo)]]
    right = first == pseudo and len(set(pseudo)) == len(pseudo) and _NEEDED <= set(pseudo) <= _PSEUDO
    if not right or any(name != name.lower() for name, _ in headers):
        raise PeerError(Code.PROTOCOL_ERROR, "headers that are none of a request's")
    return dict(headers)[b":path"].decode("latin-1")


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps; name and value are shorter than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
