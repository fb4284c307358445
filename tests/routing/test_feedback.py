"""What the end of a request teaches the router."""

import json
from typing import Any

import pytest
from routing_fleet import decided, make_node, make_router

from extproc.hardware import decode_step_s, model_shape
from extproc.openai.request import Api, RoutingRequest, parse
from extproc.openai.usage import Usage
from extproc.routing.blocks import PromptBlocks, prompt_blocks
from extproc.routing.feedback import LEAST_MISSING_TOKENS, TOLD_S, learn, with_cached
from extproc.routing.lane import FIRST_OUTPUT_TOKENS
from extproc.routing.loads import Work
from extproc.routing.node import EngineReport
from extproc.routing.outcome import Ended, Outcome
from extproc.routing.pace import ENOUGH
from extproc.routing.router import Decision, Router

MODEL = "meta-llama/Llama-3-8B-Instruct"
SYSTEM = "You explain every step with great patience. " * 200


def chat(*turns: str, hint: str | None = None, **members: Any) -> RoutingRequest:
    """A chat under one system prompt."""
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    hints = {"x-inferact": {"kv_prefix_hint": hint}} if hint else {}
    body = {"model": MODEL, "messages": messages, "stream": True, **hints, **members}
    return parse(Api.CHAT_COMPLETIONS, json.dumps(body).encode())


def request_to(api: Api, **members: Any) -> RoutingRequest:
    return parse(api, json.dumps({"model": MODEL, **members}).encode())


def outcome(
    node_id: str = "a",
    usage: Usage | None = None,
    ended: Ended = Ended.COMPLETE,
    ttft_s: float | None = 0.5,
    attempts: int = 1,
    status: int = 200,
    duration_s: float = 2.0,
) -> Outcome:
    return Outcome(
        node_id=node_id,
        attempts=attempts,
        status=status,
        ended=ended,
        duration_s=duration_s,
        ttft_s=ttft_s,
        usage=usage,
    )


class Story:
    """A router, and requests that run on it one after the other."""

    def __init__(self, *names: str) -> None:
        self.router: Router = make_router(*(make_node(name) for name in names or ("a",)))
        self.now_s = 0.0

    def send(self, request: RoutingRequest) -> Decision:
        """A request that is over, but of which no entry has come."""
        self.now_s += 10.0
        decision = decided(self.router, request, self.now_s)
        decision.booking.release(self.now_s + 2.0)
        return decision

    def learn(self, request: RoutingRequest, what: Outcome, decision: Decision | None = None) -> Decision:
        """Send it, unless it was sent, and let the entry come."""
        decision = decision or self.send(request)
        learn(self.router, decision, request, what, self.now_s, self.now_s + 2.1)
        return decision

    def blocks(self, request: RoutingRequest) -> PromptBlocks:
        return prompt_blocks(request, self.router._secret)

    def held_ratio(self, request: RoutingRequest, node_id: str = "a") -> float:
        """The share of a prompt that the index has on a node."""
        blocks = self.blocks(request)
        matched = self.router.caches.matched_bytes(request, blocks)
        held_bytes = 0.0 if matched is None else float(matched[self.router.nodes[node_id].slot])
        return held_bytes / blocks.total_bytes

    @property
    def output_tokens(self) -> float:
        return self.router._lanes[MODEL].output_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.router._lanes[MODEL].bytes_per_token

    @property
    def prefill_pace(self) -> list[float]:
        return [float(factor) for factor in self.router.pace.prefill]


class TestTimes:
    def test_of_first_tokens_teach_the_pace_of_the_node(self) -> None:
        story = Story()
        for number in range(ENOUGH):
            story.learn(chat(f"{number} " * 5000), outcome(ttft_s=1.0))
        (pace,) = story.prefill_pace
        predicted_s = story.send(chat("x " * 5000)).predicted_s
        assert pace == pytest.approx(1.0 / predicted_s, rel=0.1)

    def test_count_from_the_pick_not_from_the_time_in_the_queue(self) -> None:
        story = Story()
        for number in range(ENOUGH):
            request = chat(f"{number} " * 5000)
            decision = story.send(request)
            learn(story.router, decision, request, outcome(ttft_s=21.0), story.now_s - 20.0, story.now_s + 2)
        queued = story.prefill_pace
        other = Story()
        for number in range(ENOUGH):
            other.learn(chat(f"{number} " * 5000), outcome(ttft_s=1.0))
        assert queued == pytest.approx(other.prefill_pace)

    def test_of_another_node_teach_nothing_of_this_one(self) -> None:
        story = Story("a", "b")
        for number in range(ENOUGH * 4):
            decision = story.send(request := chat(f"{number} " * 5000))
            other = next(name for name in "ab" if name != decision.node.id)
            story.learn(request, outcome(other, attempts=2), decision)
        assert story.prefill_pace == [1.0, 1.0]

    def test_of_an_answer_that_is_no_stream_are_unknown(self) -> None:
        story = Story()
        for number in range(ENOUGH):
            story.learn(chat(f"{number} " * 5000, stream=False), outcome(ttft_s=None, usage=Usage(9000, 50)))
        assert (story.prefill_pace, float(story.router.pace.decode[0])) == ([1.0], 1.0)

    def test_of_a_stream_that_was_left_are_as_good_as_any(self) -> None:
        story = Story()
        for number in range(ENOUGH):
            story.learn(chat(f"{number} " * 5000), outcome(ended=Ended.CLIENT_LEFT, ttft_s=1.9))
        assert story.prefill_pace != [1.0]

    @pytest.mark.parametrize("others", [0, 3])
    @pytest.mark.parametrize("prompt_tokens", [3_000, 100_000])
    def test_of_decoding_are_held_against_all_that_ran_at_the_end_the_request_itself_included(
        self, prompt_tokens: int, others: int
    ) -> None:
        story = Story()
        node = story.router.nodes["a"]
        for _ in range(others):
            story.router.book(node, Work(prompt_tokens, 100.0, 0.0), 0.0)
        context_tokens = prompt_tokens + 50.0
        step_s = decode_step_s(node.profile, model_shape(MODEL), 1 + others, context_tokens)
        for number in range(ENOUGH):
            request = chat(f"{number:5}".ljust(prompt_tokens * 4 - len(SYSTEM)), max_tokens=100)
            what = outcome(ttft_s=0.5, duration_s=0.5 + 2.0 * step_s * 100, usage=Usage(prompt_tokens, 100))
            story.learn(request, what)
        assert float(story.router.pace.decode[0]) == pytest.approx(2.0, rel=0.01)


class TestSeveralAnswers:
    """What usage tells of them in sum tells nothing of any."""

    @pytest.mark.parametrize(
        ("api", "members"),
        [
            (Api.CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "hi"}], "n": 8}),
            (Api.COMPLETIONS, {"prompt": "hi", "n": 8}),
            (Api.COMPLETIONS, {"prompt": "hi", "best_of": 8}),
            (Api.COMPLETIONS, {"prompt": ["hi"] * 8}),
            (Api.COMPLETIONS, {"prompt": [[1, 2, 3]] * 8}),
        ],
    )
    def test_teach_nothing(self, api: Api, members: dict[str, Any]) -> None:
        story = Story()
        for _ in range(ENOUGH):
            story.learn(request_to(api, stream=True, **members), outcome(usage=Usage(80, 8000, 16)))
        assert story.output_tokens == FIRST_OUTPUT_TOKENS
        assert story.bytes_per_token == 4.0
        assert story.router.pace.decode[0] == 1.0
        assert story.router.nodes["a"].predictions.count == 0


class TestLengths:
    @pytest.mark.parametrize("api", list(Api))
    def test_are_learned_from_apis_that_generate(self, api: Api) -> None:
        story = Story()
        members = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
        story.learn(request_to(api, **members), outcome(usage=Usage(10, 1000)))
        generates = api in (Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES)
        assert (story.output_tokens > FIRST_OUTPUT_TOKENS) is generates

    def test_are_not_learned_without_usage(self) -> None:
        story = Story()
        story.learn(chat("hi"), outcome())
        assert (story.output_tokens, story.bytes_per_token) == (FIRST_OUTPUT_TOKENS, 4.0)

    def test_are_learned_from_whichever_node_served(self) -> None:
        story = Story("a", "b")
        decision = story.send(request := chat("hi"))
        other = next(name for name in "ab" if name != decision.node.id)
        story.learn(request, outcome(other, usage=Usage(1000, 1000), attempts=2), decision)
        assert story.output_tokens > FIRST_OUTPUT_TOKENS

    def test_of_a_response_that_follows_another_tell_nothing_of_the_tokenizer(self) -> None:
        story = Story()
        follows = request_to(Api.RESPONSES, input="and then?", previous_response_id="resp_1")
        story.learn(follows, outcome(usage=Usage(5000, 1000, 4900)))
        assert story.bytes_per_token == 4.0
        assert story.output_tokens > FIRST_OUTPUT_TOKENS
        assert story.router.nodes["a"].predictions.count == 0

    @pytest.mark.parametrize("usage", [Usage(0), Usage(0, 0, 0), Usage(2**31, 2**31, 2**31), Usage(1, 0, 0)])
    def test_that_are_absurd_break_nothing(self, usage: Usage) -> None:
        story = Story()
        for request in (chat("hi", hint="h"), chat("hi", hint="h"), request_to(Api.COMPLETIONS, prompt="")):
            story.learn(request, outcome(usage=usage))
        assert 1 <= story.bytes_per_token <= 8

    def test_of_many_short_prompts_weigh_no_more_than_their_tokens(self) -> None:
        story = Story()
        lane = story.router._lanes[MODEL]
        for _ in range(200):
            lane.learn(400_000, 100_000, 100)
        for _ in range(100):
            lane.learn(2_000, 1_900, 100)
        assert story.bytes_per_token > 3.5

    def test_are_those_of_the_latest_prompts(self) -> None:
        story = Story()
        lane = story.router._lanes[MODEL]
        for prompt_bytes in (400_000, 250_000):
            for _ in range(300):
                lane.learn(prompt_bytes, 100_000, 100)
        assert story.bytes_per_token == pytest.approx(2.5, rel=0.01)

    @pytest.mark.parametrize(("prompt_bytes", "bound"), [(10, 1.0), (10_000_000, 8.0)])
    def test_have_bounds_whatever_one_client_sends(self, prompt_bytes: int, bound: float) -> None:
        story = Story()
        for _ in range(500):
            story.router._lanes[MODEL].learn(prompt_bytes, 100_000, 100)
        assert story.bytes_per_token == pytest.approx(bound, rel=0.01)

    def test_that_vary_a_little_change_no_nodes_room_for_prompts(self) -> None:
        story = Story()
        node, lane = story.router.nodes["a"], story.router._lanes[MODEL]
        capacities = []
        for number in range(200):
            lane.learn(380_000 + 1_000 * (number % 40), 100_000, 100)
            node.take_report(EngineReport(float(number), kv_capacity_tokens=500_000), ours=0)
            story.router.reported(node)
            capacities.append(story.router.caches.index._nodes[node.slot].capacity_bytes)
        assert set(capacities) == {2_000_000}
        for _ in range(200):
            lane.learn(250_000, 100_000, 100)
        story.router.reported(node)
        assert story.router.caches.index._nodes[node.slot].capacity_bytes == pytest.approx(1_250_000, rel=0.1)


def usage_of(decision: Decision, cached_tokens: int | None) -> Usage:
    """Usage as of an engine whose tokens have four bytes."""
    return Usage(decision.blocks.total_bytes // 4, 50, cached_tokens)


class TestCachedTokens:
    FIRST = chat("why? " * 500)
    SECOND = chat("why? " * 500, "because " * 500, "and how? " * 500)
    SIBLING = chat("why? " * 500, "for the fun of it " * 500, "really? " * 500)

    def after(self, missing_tokens: int | None) -> Story:
        """The engine found so much less of the second turn cached than the index had."""
        story = Story()
        story.send(self.FIRST)
        story.send(self.SIBLING)
        decision = story.send(self.SECOND)
        cached = None if missing_tokens is None else int(decision.matched_bytes / 4) - missing_tokens
        story.learn(self.SECOND, outcome(usage=usage_of(decision, cached)), decision)
        return story

    def test_as_predicted_confirm_the_index(self) -> None:
        story = self.after(missing_tokens=0)
        assert story.router.nodes["a"].predictions.ratio(story.now_s) == pytest.approx(0, abs=0.01)
        assert min(map(story.held_ratio, (self.FIRST, self.SECOND, self.SIBLING))) > 0.9

    def test_that_are_fewer_take_what_followed_from_the_index_but_not_the_prompt_itself(self) -> None:
        story = self.after(missing_tokens=1000)
        assert min(map(story.held_ratio, (self.FIRST, self.SECOND))) > 0.9
        assert story.held_ratio(self.SIBLING) < 0.5
        error_tokens = 1000 / (story.blocks(self.SECOND).total_bytes / 4)
        assert story.router.nodes["a"].predictions.ratio(story.now_s) == pytest.approx(error_tokens, rel=0.01)

    @pytest.mark.parametrize("missing_tokens", [16, 128, LEAST_MISSING_TOKENS - 1])
    def test_that_are_fewer_by_some_blocks_say_nothing(self, missing_tokens: int) -> None:
        assert self.after(missing_tokens).held_ratio(self.SIBLING) > 0.9

    def test_that_are_more_say_nothing(self) -> None:
        assert self.after(missing_tokens=-500).held_ratio(self.SIBLING) > 0.9

    def test_that_are_not_told_say_nothing(self) -> None:
        story = self.after(missing_tokens=None)
        assert story.held_ratio(self.SIBLING) > 0.9
        assert story.router.nodes["a"].predictions.count == 0

    def test_that_are_not_told_are_none_on_a_node_that_tells_others(self) -> None:
        story = Story()
        node = story.router.nodes["a"]
        story.send(self.FIRST)
        story.send(self.SIBLING)
        decision = story.send(self.SECOND)
        told = with_cached(outcome(usage=Usage(100, 5, 48)), node, Api.CHAT_COMPLETIONS, story.now_s)
        assert told.usage == Usage(100, 5, 48)
        evicted = outcome(usage=usage_of(decision, None))
        story.learn(self.SECOND, with_cached(evicted, node, self.SECOND.api, story.now_s), decision)
        assert story.held_ratio(self.SIBLING) < 0.5
        error_ratio = decision.matched_bytes / decision.blocks.total_bytes
        assert node.predictions.ratio(story.now_s) == pytest.approx(error_ratio)

    @pytest.mark.parametrize(
        ("api", "after_s", "cached_tokens"),
        [
            (Api.CHAT_COMPLETIONS, 0.0, 0),
            (Api.CHAT_COMPLETIONS, TOLD_S, 0),
            (Api.CHAT_COMPLETIONS, TOLD_S + 1.0, None),
            (Api.COMPLETIONS, 0.0, None),
            (Api.EMBEDDINGS, 0.0, None),
        ],
    )
    def test_that_are_not_told_are_unknown_of_another_api_or_after_long(
        self, api: Api, after_s: float, cached_tokens: int | None
    ) -> None:
        node = make_node("a")
        with_cached(outcome(usage=Usage(100, 5, 48)), node, Api.CHAT_COMPLETIONS, 1000.0)
        silent = with_cached(outcome(usage=Usage(100, 5)), node, api, 1000.0 + after_s)
        assert silent.usage == Usage(100, 5, cached_tokens)

    def test_of_an_answer_without_usage_are_unknown(self) -> None:
        node = make_node("a")
        with_cached(outcome(usage=Usage(100, 5, 48)), node, Api.CHAT_COMPLETIONS, 0.0)
        assert with_cached(outcome(), node, Api.CHAT_COMPLETIONS, 0.0).usage is None

    def test_of_a_prompt_that_had_to_wait_say_nothing_for_it_was_perhaps_not_computed_yet(self) -> None:
        story = Story()
        decided(story.router, self.FIRST)
        decided(story.router, self.SIBLING)
        decision = decided(story.router, self.SECOND)
        assert decision.matched_bytes
        learn(story.router, decision, self.SECOND, outcome(usage=usage_of(decision, 0)), 0.0, 3.0)
        assert story.held_ratio(self.SIBLING) > 0.9

    def test_are_reported_for_the_hint(self) -> None:
        story = Story()
        decision = story.learn(chat("why?", hint="patience"), outcome())
        story.learn(request := chat("how?", hint="patience"), outcome(usage=usage_of(decision, 1024)))
        story.router.caches.index.clear_node(0)
        assert story.router.caches.matched_bytes(request, decision.blocks) == pytest.approx([4096], rel=0.01)

    def test_are_not_reported_for_a_hint_of_a_request_that_went_elsewhere(self) -> None:
        story = Story("a", "b")
        decision = story.send(request := chat("how?", hint="patience"))
        other = next(name for name in "ab" if name != decision.node.id)
        story.learn(request, outcome(other, usage=usage_of(decision, 1024), attempts=2), decision)
        assert story.router.caches.hints.reports(MODEL, "patience", decision.blocks) == {}


class TestANodeThatTookOver:
    def test_holds_the_prompt_even_if_we_hear_of_it_too_late(self) -> None:
        story = Story("a", "b")
        decision = story.send(request := chat("why?"))
        other = next(name for name in "ab" if name != decision.node.id)
        story.learn(request, outcome(other, attempts=2), decision)
        assert story.held_ratio(request, other) > 0
        assert story.held_ratio(request, decision.node.id) == 0

    @pytest.mark.parametrize("ended", [Ended.ERROR, Ended.BROKEN, Ended.CLIENT_LEFT, Ended.TIMED_OUT])
    def test_and_failed_too_holds_nothing(self, ended: Ended) -> None:
        story = Story("a", "b")
        decision = story.send(request := chat("why?"))
        other = next(name for name in "ab" if name != decision.node.id)
        story.learn(request, outcome(other, ended=ended, attempts=2), decision)
        matched = story.router.caches.matched_bytes(request, decision.blocks)
        assert matched is not None
        assert matched[story.router.nodes[other].slot] == 0

    def test_and_is_gone_from_the_configuration_is_no_matter(self) -> None:
        story = Story()
        story.learn(chat("why?"), outcome("gone", usage=Usage(100, 10, 50), attempts=2))


def test_a_prompt_that_the_engine_refused_is_not_held() -> None:
    story = Story()
    held = story.send(chat("a question " * 200))
    refused_chat = chat("another question " * 200)
    refused = story.send(refused_chat)
    before = story.router.caches.index.blocks(0)
    story.learn(refused_chat, outcome(ended=Ended.ERROR, status=400, ttft_s=None), refused)
    assert story.router.caches.index.blocks(0) < before
    match = story.router.caches.index.match(held.blocks)
    assert match.matched_blocks(0) == len(held.blocks.hashes), "what others need stays"
