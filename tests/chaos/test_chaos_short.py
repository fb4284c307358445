"""A short run of chaos, on the real Envoy: `make chaos` is the long one."""

import pytest
from chaos_run import Settings, run

pytestmark = [pytest.mark.envoy, pytest.mark.slow]


async def test_nothing_is_lost_in_a_short_run_of_chaos() -> None:
    ledger = await run(Settings(seconds=25.0, seed=25, clients=40), say=print)
    print(ledger)
    assert "\n".join(ledger.faults()) == ""
    assert len(ledger.exchanges) > 100
