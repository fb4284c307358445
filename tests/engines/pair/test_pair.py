"""Prompts that one real vLLM computes and another answers, by Envoy and the service."""

import pytest
from engine_pair import Pair

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

REQUESTS = 20
TOKENS = 1200
"""More than the least that is worth a transfer."""


async def test_what_is_prefilled_apart_is_answered_as_if_it_was_not(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"story {number}: " + f"{number} and then " * (TOKENS // 3) for number in range(REQUESTS)]
    split = [await pair.ask(pair.stack.url, prompt) for prompt in prompts]

    router = pair.stack.service.router
    legs = await pair.stack.metric("inferact_prefill_legs_total")
    failed = await pair.stack.metric("inferact_prefill_fallbacks_total")
    transfers = await pair.decode.metric("vllm:nixl_xfer_time_seconds_count")
    failures = await pair.decode.metric("vllm:nixl_num_failed_transfers_total")
    taken_bytes = await pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    with capsys.disabled():
        print(f"\n{legs:.0f} legs, {failed:.0f} fell back; {transfers:.0f} transfers, {failures:.0f} failed,")
        print(f"{taken_bytes / 1e6:.1f} MB")
    assert (legs, failed) == (REQUESTS, 0)
    assert (transfers, failures) == (REQUESTS, 0)
    assert not any(node.in_flight for node in router.nodes.values())

    whole = [await pair.ask(pair.prefill.url, prompt) for prompt in prompts]
    assert split == whole
