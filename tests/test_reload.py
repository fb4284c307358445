"""Reading the configuration file again: when it changes, and when it is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.config import Config, load_config
from extproc.reload import Reloader, ReloadError

NODE = """\
nodes:
  - id: {id}
    hardware: a100-80g
    backend: vllm
    endpoint: http://10.0.0.1:8000
    models: [m]
"""


def write(path: Path, node_id: str, more: str = "") -> None:
    path.write_text(NODE.format(id=node_id) + more)


def remove(path: Path) -> None:
    path.unlink()


class Applied:
    """What was put in force, and whether that works."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.calls = 0
        self.fault: OSError | None = None
        self.event = asyncio.Event()

    async def __call__(self, config: Config) -> None:
        if self.fault is not None:
            raise self.fault
        self.calls += 1
        self.config = config
        self.event.set()

    async def next(self) -> str:
        """The id of the node in force after the next change."""
        async with asyncio.timeout(10):
            await self.event.wait()
        self.event.clear()
        return self.config.nodes[0].id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "inferact.yaml"
    write(path, "first")
    return path


@pytest.fixture
def applied(path: Path) -> Applied:
    return Applied(load_config(path))


@pytest.fixture
async def reloader(path: Path, applied: Applied) -> AsyncIterator[Reloader]:
    reloader = Reloader(path, lambda: applied.config, applied)
    yield reloader
    await reloader.stop()


async def test_a_change_is_told_and_put_in_force(path: Path, applied: Applied, reloader: Reloader) -> None:
    write(path, "second")
    told = await reloader.reload()
    assert (told.added, told.removed) == (("second",), ("first",))
    assert applied.config.nodes[0].id == "second"
    assert not await reloader.reload()
    assert applied.calls == 1


async def test_a_dry_run_only_tells(path: Path, applied: Applied, reloader: Reloader) -> None:
    write(path, "second")
    assert (await reloader.reload(dry_run=True)).added == ("second",)
    write(path, "no id")
    with pytest.raises(ReloadError):
        await reloader.reload(dry_run=True)
    assert (applied.calls, reloader.errors) == (0, [])


async def test_a_broken_file_is_refused_as_a_whole_with_every_reason(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    write(path, "second", "kv_cache: {policy: best}\nbatchng: {}\n")
    with pytest.raises(ReloadError) as refused:
        await reloader.reload()
    assert [reason.split(": ")[:2] for reason in refused.value.reasons] == [
        [f"{path}:7", "kv_cache.policy"],
        [f"{path}:8", "batchng"],
    ]
    assert reloader.errors == refused.value.reasons
    assert applied.calls == 0
    write(path, "first")
    await reloader.reload()
    assert reloader.errors == [], "mended, though nothing differs"


async def test_a_change_that_cannot_be_carried_out_is_refused(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    write(path, "second")
    applied.fault = OSError(28, "No space left on device")
    with pytest.raises(ReloadError, match="No space left on device"):
        await reloader.reload()
    assert reloader.errors == [f"{path}: cannot be applied: No space left on device"]


async def test_a_file_that_is_written_in_place_is_noticed(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    reloader.start()
    write(path, "second")
    assert await applied.next() == "second"


async def test_a_file_that_an_editor_replaces_is_noticed(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    reloader.start()
    for name in ("second", "third"):
        fresh = path.with_suffix(".new")
        fresh.write_text(NODE.format(id=name))
        fresh.replace(path)
        assert await applied.next() == name


async def test_a_mounted_config_map_is_noticed_when_its_links_are_swapped(tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second")):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "inferact.yaml").write_text(NODE.format(id=name))
    (tmp_path / "..data").symlink_to("..0")
    path = tmp_path / "mounted.yaml"
    path.symlink_to("..data/inferact.yaml")
    applied = Applied(load_config(path))
    reloader = Reloader(path, lambda: applied.config, applied)
    reloader.start()
    (tmp_path / "..tmp").symlink_to("..1")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert await applied.next() == "second"
    await reloader.stop()


async def test_a_file_that_is_gone_for_good_is_an_error_until_it_is_back(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    reloader.start()
    remove(path)
    async with asyncio.timeout(10):
        while not reloader.errors:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert reloader.errors == [f"{path}: no such file"]
    write(path, "second")
    assert await applied.next() == "second"


async def test_a_change_before_the_watch_began_is_noticed(
    path: Path, applied: Applied, reloader: Reloader
) -> None:
    write(path, "second")
    reloader.start()
    assert await applied.next() == "second"
