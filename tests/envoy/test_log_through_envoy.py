"""The access log as Envoy writes it, a JSON line a request: what a replay can make of it."""

import json

import pytest
from envoy_stack import MODEL, Stack, until

from extproc.simulator.replay.formats import read_trace

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_the_log_can_be_replayed_and_holds_no_prompt(stack: Stack) -> None:
    log = stack.service.config.scheduler.run_dir / "access.log"
    before = len(log.read_text().splitlines())
    words = "the words of a prompt " * 40
    await stack.chat(words)
    async with stack.client.stream(
        "POST",
        "/v1/completions?key=secret",
        json={"model": MODEL, "prompt": words, "stream": True, "max_tokens": 4},
    ) as answer:
        await answer.aread()
    await stack.chat(words, model="nobody/knows")
    await stack.client.get("/status")
    await until(lambda: len(log.read_text().splitlines()) == before + 4)
    text = log.read_text()
    assert "words" not in text and "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()[before:]]
    assert {line["node"] for line in lines if line["route"] == "routed"} <= set(stack.sims)
    only = stack.folder / "these.log"
    only.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(only)
    assert [request.model for request in trace.requests] == [MODEL, MODEL]
    assert all(200 <= request.prompt_tokens <= 400 for request in trace.requests)
    assert "2 lines" in trace.notes[0]


async def test_the_log_tells_what_the_decision_was_made_of(stack: Stack) -> None:
    log = stack.service.config.scheduler.run_dir / "access.log"
    before = len(log.read_text().splitlines())
    answer = await stack.chat("a question of some length " * 40)
    await until(lambda: len(log.read_text().splitlines()) == before + 1)
    line = json.loads(log.read_text().splitlines()[-1])
    receipt = stack.service.router.receipts.find(answer.headers["x-request-id"])
    assert receipt is not None
    chosen = next(receipt.candidates())
    assert line["cost_s"] == pytest.approx(chosen.cost_s, abs=1e-6)
    assert line["prompt_tokens"] == round(receipt.prompt_tokens)
    assert (line["matched_tokens"], line["waited_s"]) == (chosen.matched_tokens, 0)
    assert (line["node"], line["attempts"]) == (answer.headers["x-inferact-node"], 1)
