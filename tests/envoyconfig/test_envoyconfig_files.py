"""The files: whole or not at all, and keys in their own, for nobody else to read."""

import contextlib
import json
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from envoy_sets import KEY, KEY_NAME, made, node, objects, resources, written

from extproc.envoyconfig.files import write_all, write_copy, write_routes
from extproc.envoyconfig.shapes import Json
from extproc.rundir import RunDir


class TestKeys:
    def test_are_in_no_file_but_their_own(self, folder: Path) -> None:
        run = written(folder, "API keys")
        secret = run.secret("a")
        for path in folder.rglob("*"):
            if path.is_file() and path != secret:
                text = path.read_text()
                assert KEY not in text
                assert json.dumps(KEY)[1:-1] not in text
        (read,) = resources(secret)
        assert read["generic_secret"] == {"secret": {"inline_string": f"Bearer {KEY}"}}

    def test_are_for_the_owners_eyes_only_even_where_a_file_was_open_before(self, folder: Path) -> None:
        config, run = made(folder, "API keys")
        run.xds.mkdir()
        run.secret("a").write_text("{}")
        run.secret("a").chmod(0o644)
        write_all(config, run)
        assert stat.S_IMODE(run.secret("a").stat().st_mode) == 0o600

    def test_have_a_file_for_each_node_that_has_one(self, folder: Path) -> None:
        run = written(folder, "API keys")
        assert [path.name for path in run.xds.glob("secret-*")] == ["secret-a.json"]
        (used,) = [each for each in objects(resources(run.clusters)) if "sds_config" in each]
        assert used["sds_config"]["path_config_source"]["path"] == str(run.secret("a"))
        (secret,) = resources(run.secret("a"))
        assert used["name"] == secret["name"]

    @pytest.mark.parametrize(
        "nodes", [[node("b", api_key_env=KEY_NAME)], [node("a"), node("b", api_key_env=KEY_NAME)]]
    )
    def test_do_not_outlive_their_node_or_its_need_of_one(self, nodes: list[Json], folder: Path) -> None:
        run = written(folder, "API keys")
        assert run.secret("a").exists()
        written(folder, {"nodes": nodes})
        assert [path.name for path in run.xds.glob("*secret*")] == ["secret-b.json"]

    def test_stay_while_the_clusters_that_name_them_cannot_be_replaced(self, folder: Path) -> None:
        run = written(folder, "API keys")
        with full_disk(free_bytes=64), pytest.raises(OSError, match="large"):
            written(folder, "plain http")
        assert run.secret("a").exists()

    def test_stay_out_of_a_copy(self, folder: Path) -> None:
        config, run = made(folder, "API keys")
        copy = RunDir(folder / "copy")
        write_copy(config, run, copy)
        assert copy.clusters.exists()
        assert list(copy.xds.glob("secret-*")) == []
        assert KEY not in "".join(path.read_text() for path in folder.rglob("*.*") if path.is_file())


@contextlib.contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """No file can grow beyond this, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestFiles:
    def test_are_readable_for_envoy(self, folder: Path) -> None:
        run = written(folder, "plain http")
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.bootstrap, run.clusters, run.routes)]
        assert modes == [0o644] * 3

    def test_are_replaced_and_never_written_in_place(self, folder: Path) -> None:
        run = written(folder, "plain http")
        with run.routes.open() as old:
            before = old.read()
            write_routes(made(folder, "several nodes with weights")[0], run, frozenset())
            old.seek(0)
            assert old.read() == before, "whoever reads the old file reads it to its end"
        assert run.routes.read_text() != before

    @pytest.mark.parametrize("name", ["API keys", "64 nodes and 4 models"])
    def test_stay_as_they_are_when_writing_fails(
        self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = written(folder, "API keys")
        before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
        monkeypatch.setenv(KEY_NAME, "another-key")
        config, _ = made(folder, name)
        with full_disk(free_bytes=64):
            with pytest.raises(OSError, match="large"):
                write_all(config, run)
            with pytest.raises(OSError, match="large"):
                write_routes(config, run, frozenset({"a"}))
        assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before

    def test_leave_no_temporary_file_behind(self, folder: Path) -> None:
        run = written(folder, "API keys")
        write_all(*made(folder, "API keys"))
        assert {path.name for path in run.xds.iterdir()} == {"clusters.json", "routes.json", "secret-a.json"}
        assert {path.name for path in folder.iterdir()} == {"xds", "envoy.yaml"}
