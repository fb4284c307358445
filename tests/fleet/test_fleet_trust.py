"""Keys and TLS towards the engines."""

import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fleet_support import Changes, Engine, node_of, running_engine, watching

from extproc.routing.node import Health

TLS = Path(__file__).parent.parent / "data" / "tls"
KEY = "sk-never-to-be-seen"
CERTIFICATE = {"cert_file": TLS / "engine.pem", "key_file": TLS / "engine.pem"}
TRUST = {"ca_file": TLS / "authority.pem", "sni": "engine.test"}


async def test_requests_carry_base_path_and_key_and_ask_for_no_compression(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    node = node_of(engine, base_path="/engine-a", api_key_env="ENGINE_KEY")
    async with watching(node, changes=Changes()):
        await engine.answered("/engine-a/metrics")
        await engine.answered("/engine-a/health")
    assert set(engine.asked) == {"/engine-a/health", "/engine-a/metrics"}
    headers = engine.requests[0].headers
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Accept-Encoding"] == "identity"


async def test_a_wrong_key_is_named_as_the_likely_cause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", KEY)
    engine.health = 401
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health answered 401: check the node's api_key_env"


async def test_a_key_that_no_header_can_carry_fails_the_probe_and_is_not_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENGINE_KEY", f"{KEY}\r\nx: y")
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "GET /health: ValueError"
    assert KEY not in caplog.text


async def test_a_missing_key_is_named_by_its_variable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    node, changes = node_of(engine, api_key_env="ENGINE_KEY"), Changes()
    async with watching(node, changes=changes):
        assert await changes.next() is Health.OFFLINE
    assert node.last_error == "the environment variable ENGINE_KEY holds no API key"
    assert not engine.asked


async def tls_engine(stack: AsyncExitStack, client_certificate: bool = False) -> Engine:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "engine.pem")
    if client_certificate:
        context.load_verify_locations(TLS / "authority.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    return await stack.enter_async_context(running_engine(ssl=context))


async def test_tls_trusts_the_nodes_authority_and_checks_the_name_in_sni() -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack), Changes()
        async with watching(node_of(engine, scheme="https", tls=TRUST), changes=changes):
            assert await changes.next() is Health.HEALTHY
            await engine.answered("/metrics")


async def test_tls_shows_the_nodes_certificate() -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack, client_certificate=True), Changes()
        async with watching(node_of(engine, scheme="https", tls=TRUST | CERTIFICATE), changes=changes):
            assert await changes.next() is Health.HEALTHY


@pytest.mark.parametrize(
    ("tls", "error"),
    [
        ({}, "unable to get local issuer certificate"),
        ({"ca_file": TLS / "authority.pem"}, "IP address mismatch"),
        ({"ca_file": TLS / "absent.pem"}, "the files of `tls` cannot be read: No such file or directory"),
        (
            {"cert_file": TLS / "authority.pem", "key_file": TLS / "authority.pem"},
            "no unencrypted key",
        ),
    ],
)
async def test_tls_that_cannot_be_trusted_or_loaded_says_why(tls: dict[str, object], error: str) -> None:
    async with AsyncExitStack() as stack:
        engine, changes = await tls_engine(stack), Changes()
        node = node_of(engine, scheme="https", tls=tls)
        async with watching(node, changes=changes):
            assert await changes.next() is Health.OFFLINE
    assert error in (node.last_error or "")
