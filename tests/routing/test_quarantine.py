"""Prompts that engines die of."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_fleet import decided, make_node, make_request, make_router

from extproc.openai.errors import ApiError, ErrorCode
from extproc.openai.request import Api, parse
from extproc.routing.blocks import prompt_blocks
from extproc.routing.node import Health
from extproc.routing.quarantine import DEATH_S, KEPT, QUARANTINE_S, SERVED_S, Quarantine
from extproc.routing.router import FALLBACKS, Router

KILLER, INNOCENT = 7, 8


def killed(quarantine: Quarantine, node: str, at_s: float, prompt: int = KILLER) -> None:
    """The node breaks a prompt off, and is found dead a second later."""
    quarantine.broken(prompt, node, at_s)
    quarantine.died(node, at_s + 1.0)


class TestQuarantine:
    def test_holds_a_prompt_of_which_two_nodes_died(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        assert not quarantine.holds(KILLER, 1.0)
        assert quarantine.dead_nodes(KILLER) == 1
        killed(quarantine, "b", 5.0)
        assert quarantine.holds(KILLER, 6.0)
        assert not quarantine.holds(INNOCENT, 6.0)
        [entry] = quarantine.listed(6.0)
        assert (entry.key, entry.nodes, entry.left_s) == (f"{KILLER:016x}", ("a", "b"), QUARANTINE_S)

    def test_learns_of_a_death_before_it_learns_of_the_broken_request_too(self) -> None:
        quarantine = Quarantine()
        for node in ("a", "b"):
            quarantine.died(node, 1.0)
            quarantine.broken(KILLER, node, 1.0 + DEATH_S - 0.1)
        assert quarantine.holds(KILLER, 1.0 + DEATH_S)

    def test_does_not_blame_a_prompt_for_the_same_node_twice(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        killed(quarantine, "a", 20.0)
        assert not quarantine.holds(KILLER, 21.0)

    def test_does_not_blame_a_prompt_for_a_node_that_lives_or_died_much_later(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        quarantine.broken(KILLER, "b", 1.0)
        assert not quarantine.holds(KILLER, 2.0)
        quarantine.died("b", 1.0 + DEATH_S)
        assert not quarantine.holds(KILLER, 2.0 + DEATH_S)

    def test_does_not_blame_a_prompt_that_some_node_served(self) -> None:
        """Before it, between, or after: where many nodes die at once, the requests on them are not why."""
        for when in range(3):
            quarantine = Quarantine()
            for step, node in enumerate(("a", "b")):
                if step == when:
                    quarantine.served(KILLER, 3.0)
                killed(quarantine, node, float(step))
            if when == 2:
                assert quarantine.holds(KILLER, 3.0)
                quarantine.served(KILLER, 3.0)
            assert not quarantine.holds(KILLER, 3.0)

    def test_blames_a_prompt_that_was_served_long_ago(self) -> None:
        quarantine = Quarantine()
        quarantine.served(KILLER, 0.0)
        killed(quarantine, "a", SERVED_S)
        killed(quarantine, "b", SERVED_S + 1.0)
        assert quarantine.holds(KILLER, SERVED_S + 3.0)

    def test_holds_none_of_those_that_were_lost_together_until_it_is_clear_which_one_kills(self) -> None:
        quarantine, lost = Quarantine(), [KILLER, INNOCENT, 9]
        for at_s, node in ((0.0, "a"), (10.0, "b")):
            for prompt in lost:
                quarantine.broken(prompt, node, at_s)
            quarantine.died(node, at_s + 1.0)
        assert not any(quarantine.holds(prompt, 12.0) for prompt in lost)
        assert quarantine.listed(12.0) == []
        assert [quarantine.dead_nodes(prompt) for prompt in lost] == [FALLBACKS] * 3, "each comes alone now"
        quarantine.served(INNOCENT, 12.0)
        killed(quarantine, "c", 20.0)
        assert [quarantine.holds(prompt, 22.0) for prompt in lost] == [True, False, False]

    def test_holds_the_last_one_left_when_the_others_were_served(self) -> None:
        quarantine = Quarantine()
        for at_s, node in ((0.0, "a"), (10.0, "b")):
            quarantine.broken(INNOCENT, node, at_s)
            killed(quarantine, node, at_s)
        assert not quarantine.holds(KILLER, 12.0)
        quarantine.served(INNOCENT, 12.0)
        assert quarantine.holds(KILLER, 12.0)

    def test_lets_a_prompt_out_in_time(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        killed(quarantine, "b", 1.0)
        assert quarantine.holds(KILLER, 1.9 + QUARANTINE_S)
        assert not quarantine.holds(KILLER, 2.0 + QUARANTINE_S)
        assert not quarantine.listed(2.0 + QUARANTINE_S)
        assert quarantine.dead_nodes(KILLER) == 0

    def test_lets_a_prompt_out_when_an_operator_says_so(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        killed(quarantine, "b", 1.0)
        assert quarantine.clear(quarantine.listed(2.0)[0].key)
        assert not quarantine.holds(KILLER, 2.0)
        for key in (f"{KILLER:016x}", "", "no key", f"{INNOCENT:016x}"):
            assert not quarantine.clear(key)

    def test_forgets_a_suspicion_after_as_long(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        killed(quarantine, "b", 2.0 + QUARANTINE_S)
        assert quarantine.holds(KILLER, 4.0 + QUARANTINE_S)
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0)
        quarantine.died("c", 2.0 + QUARANTINE_S)
        killed(quarantine, "b", 3.0 + QUARANTINE_S)
        assert not quarantine.holds(KILLER, 5.0 + QUARANTINE_S)

    def test_knows_nothing_of_prompts_without_a_fingerprint(self) -> None:
        quarantine = Quarantine()
        killed(quarantine, "a", 0.0, prompt=0)
        killed(quarantine, "b", 0.0, prompt=0)
        assert not quarantine.holds(0, 1.0)

    def test_is_bounded(self) -> None:
        quarantine = Quarantine()
        for prompt in range(1, KEPT + 10):
            quarantine.broken(prompt, "a", 0.0)
            quarantine.served(-prompt, 0.0)
        quarantine.died("a", 1.0)
        assert sum(map(quarantine.dead_nodes, range(1, KEPT + 10))) == KEPT


class TestRouting:
    def kill(self, router: Router, node_id: str, prompt: str) -> None:
        blocks = decided(router, make_request(prompt=prompt)).blocks
        router.quarantine.broken(blocks.fingerprint, node_id, 0.0)
        node = router.nodes[node_id]
        node.health = Health.OFFLINE
        router.health_changed(node, 0.0)

    def test_a_prompt_in_quarantine_reaches_no_node(self) -> None:
        router = make_router(*(make_node(name) for name in "abcdef"))
        self.kill(router, "a", "killer")
        assert len(decided(router, make_request(prompt="killer")).fallbacks) == FALLBACKS - 1
        assert len(decided(router, make_request(prompt="other")).fallbacks) == FALLBACKS
        self.kill(router, "b", "killer")
        for route in (router.decide, router.explain):
            with pytest.raises(ApiError) as raised:
                route(make_request(prompt="killer", temperature=0.3), 1.0)
            assert raised.value.code is ErrorCode.POISONOUS_REQUEST
        assert "killer" not in raised.value.message
        decided(router, make_request(prompt="other"))


TEXTS = st.text(max_size=2_000)


@settings(deadline=None)
@given(st.sampled_from(list(Api)), TEXTS, TEXTS)
def test_fingerprints_tell_prompts_apart_to_the_last_byte(api: Api, one: str, other: str) -> None:
    def fingerprint(text: str, **members: float) -> int:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
        body = {"model": "m", "prompt": text, "input": text, "messages": messages, **members}
        return prompt_blocks(parse(api, json.dumps(body).encode()), 1).fingerprint

    assert (fingerprint(one) == fingerprint(other)) == (one == other)
    assert fingerprint(one) == fingerprint(one, temperature=0.5)
    assert fingerprint(one) != 0
