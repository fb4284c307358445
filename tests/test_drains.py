"""The drain store on real files."""

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from extproc.drains import DrainStore, DrainStoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "drains.sqlite"


async def test_a_new_store_is_empty_and_makes_its_directory(tmp_path: Path) -> None:
    assert await DrainStore(tmp_path / "run" / "dir" / "drains.sqlite").load() == set()


async def test_drains_survive_a_restart(path: Path) -> None:
    before = DrainStore(path)
    await before.drain("node-a")
    await before.drain("node-b")
    await before.restore("node-a")
    assert await DrainStore(path).load() == {"node-b"}


async def test_repeated_calls_are_harmless(path: Path) -> None:
    store = DrainStore(path)
    await store.drain("node-a")
    await store.drain("node-a")
    assert await store.load() == {"node-a"}
    await store.restore("node-a")
    await store.restore("node-a")
    await store.restore("never-drained")
    assert await store.load() == set()


async def test_calls_take_effect_in_the_order_made(path: Path) -> None:
    store = DrainStore(path)
    calls = [store.drain("n") if turn % 2 else store.restore("n") for turn in range(20)]
    await asyncio.gather(*calls)
    assert await store.load() == {"n"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_the_owner_can_read_the_file_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        await DrainStore(path).load()
    finally:
        os.umask(before)
    assert mode(path) == 0o600


@pytest.mark.parametrize("name", ["'; DROP TABLE drains; --", "nœud-1", "a" * 64])
async def test_any_name_comes_back_as_it_went_in(path: Path, name: str) -> None:
    store = DrainStore(path)
    await store.drain(name)
    assert await store.load() == {name}


def no_database(path: Path) -> None:
    path.write_bytes(b"nodes: [a, b]\n" * 100)


def damaged_pages(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE drains (node_id TEXT PRIMARY KEY NOT NULL) WITHOUT ROWID")
        db.executemany("INSERT INTO drains VALUES (?)", [(f"node-{n:060}",) for n in range(500)])
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def cut_short(path: Path) -> None:
    damaged_pages(path)
    path.write_bytes(path.read_bytes()[:5000])


def another_programs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE drains (pipe TEXT)")


def a_directory(path: Path) -> None:
    path.mkdir()


SPOILERS = [no_database, damaged_pages, cut_short, another_programs, a_directory]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
async def test_a_file_that_cannot_be_used_is_named_with_what_to_do(
    path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(path)
    for call in (DrainStore(path).load(), DrainStore(path).restore("n")):
        with pytest.raises(DrainStoreError) as raised:
            await call
        message = str(raised.value)
        assert message.startswith(f"The drain store {path} cannot be used: ")
        assert message.endswith("move it away to start with no drains.")
        assert "\n" not in message


async def test_a_file_that_cannot_be_used_is_left_as_it_was(path: Path) -> None:
    no_database(path)
    with pytest.raises(DrainStoreError):
        await DrainStore(path).drain("n")
    assert await asyncio.to_thread(path.read_bytes) == b"nodes: [a, b]\n" * 100


async def test_a_run_dir_that_cannot_be_made_is_the_same_error(path: Path) -> None:
    no_database(path)
    with pytest.raises(DrainStoreError, match="cannot be used"):
        await DrainStore(path / "drains.sqlite").drain("n")


async def test_it_works_again_once_the_cause_is_gone(path: Path) -> None:
    store = DrainStore(path)
    no_database(path)
    with pytest.raises(DrainStoreError):
        await store.drain("n")
    await asyncio.to_thread(path.unlink)
    await store.drain("n")
    assert await store.load() == {"n"}
