"""Asks one engine over HTTP: with its key and its TLS, within a time and a size."""

import asyncio
import errno
import os
import ssl

import aiohttp
from yarl import URL

from extproc import __version__
from extproc.config.addresses import HostPort
from extproc.config.node import NodeConfig, Tls
from extproc.routing.outcome import Failure

MAX_BODY_BYTES = 4 << 20
"""An answer above this is refused: the metrics of a busy vLLM take 64 KB."""

_RESET = "the connection was reset; is it an HTTP server?"


class NoAnswerError(Exception):
    """An engine did not give what it was asked for; the text tells people what was asked, and what came.

    `refused`: nobody listens at the engine's address. `status`: that of an answer that is not 2xx.
    `failure`: what it is of an attempt at a request.
    """

    def __init__(
        self,
        message: str,
        refused: bool = False,
        status: int | None = None,
        failure: Failure = Failure.ERROR,
    ) -> None:
        super().__init__(message)
        self.refused = refused
        self.status = status
        self.failure = failure


def open_session(keep_alive_s: float = 15.0) -> aiohttp.ClientSession:
    """The session that the clients of all nodes share; to be closed by the caller.

    Connections without a request are kept for so long. There may be any number of them, since nodes that
    hang would else hold up the probes of the others. Bodies are never decompressed: a small one cannot become
    a large one.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": f"inferact/{__version__}"},
        auto_decompress=False,
    )


class EngineClient:
    """Sends requests to the engine of one node."""

    def __init__(self, session: aiohttp.ClientSession, config: NodeConfig) -> None:
        self._session = session
        self._config = config
        self._root = f"{config.scheme}://{HostPort(config.host, config.port)}{config.base_path}"
        self._tls: ssl.SSLContext | None = None

    async def get(self, path: str, timeout_s: float) -> bytes:
        """The body of a 2xx answer. Raises NoAnswerError; a redirect is not followed."""
        return _good(f"GET {path}", *await self._ask("GET", path, None, timeout_s))

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """The body of a 2xx answer to a JSON body. Raises as `get`."""
        return _good(f"POST {path}", *await self.answer(path, body, timeout_s))

    async def answer(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of any answer to a JSON body. Raises NoAnswerError where there is none."""
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        headers = self._headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        tls = await self._tls_context()
        try:
            async with self._session.request(
                method,
                URL(self._root + path, encoded=True),
                data=body,
                headers=headers,
                ssl=tls or True,
                server_hostname=self._config.tls.sni if self._config.tls else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return response.status, await _read(f"{method} {path}", response.content)
        except TimeoutError:
            said = f"{method} {path}: no answer within {timeout_s:g} s"
            raise NoAnswerError(said, failure=Failure.TIMED_OUT) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            failure = Failure.UNREACHED if isinstance(error, aiohttp.ClientConnectorError) else Failure.LOST
            said = f"{method} {path}: {_reason(error)}"
            raise NoAnswerError(said, refused=_is_refusal(error), failure=failure) from None

    def _headers(self) -> dict[str, str]:
        if self._config.api_key_env is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._config.api_key()}"}
        except KeyError:
            raise NoAnswerError(
                f"the environment variable {self._config.api_key_env} holds no API key"
            ) from None

    async def _tls_context(self) -> ssl.SSLContext | None:
        """Built once, in a thread: it reads files. Tried again with each request while that fails."""
        if self._tls is None and self._config.tls is not None:
            try:
                self._tls = await asyncio.to_thread(_load_tls, self._config.tls)
            except ssl.SSLError:
                raise NoAnswerError(
                    "the files of `tls` hold no certificates, or no unencrypted key to go with"
                ) from None
            except OSError as error:
                raise NoAnswerError(f"the files of `tls` cannot be read: {error.strerror}") from None
        return self._tls


def _load_tls(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file is not None:
        # A password, though none is known: else OpenSSL asks the terminal for that of an encrypted key.
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    return context


def _good(asked: str, status: int, body: bytes) -> bytes:
    if not 200 <= status < 300:
        advice = ": check the node's api_key_env" if status in (401, 403) else ""
        raise NoAnswerError(f"{asked} answered {status}{advice}", status=status)
    return body


async def _read(asked: str, content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise NoAnswerError(f"{asked} answered more than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )


def _reason(error: Exception) -> str:
    """Why there was no answer, in words that hold nothing the engine sent."""
    match error:
        case aiohttp.ClientConnectorCertificateError(
            certificate_error=ssl.SSLCertVerificationError() as cause
        ):
            return f"its certificate is not trusted ({cause.verify_message})"
        case aiohttp.ClientSSLError() | ssl.SSLError():
            return "the TLS handshake failed"
        case aiohttp.ClientConnectorDNSError():
            return "its host name has no address"
        case ConnectionResetError() | aiohttp.ClientOSError(errno=errno.ECONNRESET):
            return _RESET
        case aiohttp.ClientConnectorError(os_error=OSError(errno=int(code))):
            return os.strerror(code).lower()
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection without an answer"
        case OSError(errno=int(code)):
            return os.strerror(code).lower()
    return type(error).__name__
