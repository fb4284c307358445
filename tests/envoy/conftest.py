"""Fixtures of the tests on the real Envoy."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from envoy_stack import TRANSPORT, Stack, running_stack

OVER_BOTH = {
    "test_bodies_through_envoy",
    "test_lifecycle_through_envoy",
    "test_queue_through_envoy",
    "test_stopping_through_envoy",
}
"""Modules whose tests run over both transports; the others run over `INFERACT_TRANSPORT`, or gRPC."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Bodies of all sizes, requests that wait, streams that end: what a transport may get wrong."""
    if metafunc.module.__name__ in OVER_BOTH and TRANSPORT not in os.environ:
        metafunc.parametrize("transport", ["grpc", "lean"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """What stacks of the module are told to use."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request, "param"):
            patch.setenv(TRANSPORT, request.param)
        yield


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Three equal nodes, shared by a module's tests: leave them as they were."""
    async with running_stack() as running:
        yield running
