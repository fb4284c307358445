"""Where the admin app listens, and what it says when it cannot."""

import asyncio
import logging
import socket
import stat
from pathlib import Path

import pytest
from admin_app import App
from aiohttp import ClientSession, UnixConnector

from admin.app import ListenError, make_app, start_admin

HOST = "127.0.0.1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "admin.sock"


async def get(path: Path) -> int:
    async with ClientSession(connector=UnixConnector(str(path))) as session:
        return (await session.get("http://admin/healthz")).status


async def test_it_answers_on_tcp_and_on_the_unix_socket(app: App, path: Path) -> None:
    runner = await start_admin(make_app(app.context), HOST, 0, path)
    try:
        port = runner.addresses[0][1]
        async with ClientSession() as session:
            assert (await session.get(f"http://{HOST}:{port}/healthz")).status == 200
        assert await get(path) == 200
    finally:
        await runner.cleanup()


async def test_only_user_and_group_reach_the_unix_socket(app: App, path: Path) -> None:
    runner = await start_admin(make_app(app.context), HOST, 0, path)
    try:
        assert mode(path) == 0o660
    finally:
        await runner.cleanup()


async def test_the_socket_of_a_process_that_is_gone_is_replaced(app: App, path: Path) -> None:
    for _ in range(2):
        runner = await start_admin(make_app(app.context), HOST, 0, path)
        try:
            assert await get(path) == 200
        finally:
            await runner.cleanup()
        leave_stale(path)


async def test_a_socket_in_use_is_left_to_its_owner(app: App, path: Path) -> None:
    runner = await start_admin(make_app(app.context), HOST, 0, path)
    try:
        with pytest.raises(ListenError, match=f"cannot listen on {path}: Address already in use"):
            await start_admin(make_app(app.context), HOST, 0, path)
        assert await get(path) == 200
    finally:
        await runner.cleanup()


async def test_a_file_in_the_sockets_place_is_left_alone(app: App, path: Path) -> None:
    await asyncio.to_thread(write, path, "precious")
    with pytest.raises(ListenError, match="Address already in use"):
        await start_admin(make_app(app.context), HOST, 0, path)
    assert await asyncio.to_thread(path.read_text) == "precious"


async def test_a_path_that_is_too_long_is_an_error_of_one_line(app: App, path: Path) -> None:
    with pytest.raises(ListenError, match=r"path too long; .* change scheduler\.run_dir\."):
        await start_admin(make_app(app.context), HOST, 0, path.with_name("x" * 120))


async def test_a_port_in_use_is_an_error_of_one_line(app: App, path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as refused:
            await start_admin(make_app(app.context), HOST, port, path)
    assert str(refused.value) == (
        f"The admin app cannot listen on {HOST}:{port}: Address already in use; "
        "stop what has the port, or change scheduler.admin_host or scheduler.admin_port."
    )


async def test_a_failed_start_frees_the_port(app: App, path: Path) -> None:
    await asyncio.to_thread(write, path, "in the way")
    port = free_port()
    for _ in range(2):
        with pytest.raises(ListenError, match=str(path)):
            await start_admin(make_app(app.context), HOST, port, path)


@pytest.mark.parametrize(
    "header",
    [
        b"X-Inferact-Admin-Key: a\x01secret",
        b"X-Inferact-Admin-Key : secret",
        b"X-Inferact-Admin-Key: secret" * 999,
    ],
    ids=["control character", "space before the colon", "too long"],
)
async def test_a_key_in_a_malformed_request_is_not_logged(
    app: App, path: Path, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    runner = await start_admin(make_app(app.context), HOST, 0, path)
    try:
        with caplog.at_level(logging.DEBUG):
            answer = await send(
                path, b"POST /admin/nodes/x/drain HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n"
            )
    finally:
        await runner.cleanup()
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert "a malformed request was refused" in caplog.text
    assert "secret" not in caplog.text


async def send(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)


def leave_stale(path: Path) -> None:
    """What a process that was killed leaves behind."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])
