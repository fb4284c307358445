"""Continuous batching: who runs, for how long, in which blocks. Every step here takes one second."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.simulator.batch import Batch, Generation, State
from extproc.simulator.blocks import BlockCache, block_hashes
from extproc.simulator.roofline import StepLoad


@dataclass
class Bench:
    """A batch whose steps take a second each, and what it was asked to compute in each."""

    blocks: int = 1000
    max_num_seqs: int = 256
    step_tokens: int = 2048
    loads: list[StepLoad] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.blocks)
        self.batch = Batch(self.cache, self._step_s, self.max_num_seqs, self.step_tokens)

    def _step_s(self, load: StepLoad) -> float:
        if load.tokens:
            self.loads.append(load)
        return 1.0


def generation(prompt_tokens: int, output_tokens: int, text: bytes = b"a") -> Generation:
    whole = (text * 4 * prompt_tokens)[: 4 * prompt_tokens] + b"out " * output_tokens
    return Generation(prompt_tokens, output_tokens, block_hashes(whole))


def test_the_first_token_comes_with_the_prefill_and_then_one_a_step() -> None:
    bench = Bench()
    one = generation(100, 3)
    bench.batch.submit(one, 5.0)
    for now_s, tokens in ((5.9, 0), (6.0, 1), (7.0, 2), (8.0, 3)):
        bench.batch.advance(now_s)
        assert one.generated_tokens == tokens
    assert one.state is State.FINISHED
    assert bench.batch.next_at_s is None


def test_a_late_look_finds_every_step_that_fitted_in_between() -> None:
    bench = Bench()
    one = generation(100, 50)
    bench.batch.submit(one, 0.0)
    assert bench.batch.advance(10.5) == [one]
    assert one.generated_tokens == 10
    assert bench.batch.next_at_s == 11.0


def test_a_caller_far_behind_can_catch_up_in_slices() -> None:
    bench = Bench()
    one = generation(100, 50)
    bench.batch.submit(one, 0.0)
    bench.batch.advance(1000.0, max_work=5)
    assert one.generated_tokens == 5


def test_a_generation_without_output_ends_with_its_prefill() -> None:
    bench = Bench()
    one = generation(5000, 0)
    bench.batch.submit(one, 0.0)
    bench.batch.advance(3.0)
    assert (one.state, one.generated_tokens) == (State.FINISHED, 0)
    assert bench.batch.counters.generated_tokens == 0


def test_a_long_prompt_is_computed_in_chunks_and_others_decode_meanwhile() -> None:
    bench = Bench()
    short, long = generation(10, 100, b"s"), generation(5000, 1, b"l")
    bench.batch.submit(short, 0.0)
    bench.batch.advance(1.0)
    bench.batch.submit(long, 1.0)
    bench.batch.advance(5.0)
    assert [load.tokens for load in bench.loads[:5]] == [10, 1, 2048, 2048, 1 + 5000 - 2 * 2047]
    assert long.state is State.FINISHED
    assert short.generated_tokens == 5


def test_the_same_prompt_again_computes_only_its_last_block() -> None:
    bench = Bench()
    for expected in (0, 96):
        again = generation(100, 1)
        bench.batch.submit(again, 0.0)
        bench.batch.advance(10.0)
        assert again.cached_tokens == expected
    assert bench.batch.counters.cached_tokens == 96
    assert bench.batch.counters.prompt_tokens == 200


def test_a_prompt_of_whole_blocks_still_computes_one_to_have_a_next_token() -> None:
    bench = Bench()
    for _ in range(2):
        again = generation(96, 1)
        bench.batch.submit(again, 0.0)
        bench.batch.advance(10.0)
    assert again.cached_tokens == 80


def test_the_next_turn_of_a_conversation_finds_the_answer_it_continues() -> None:
    bench = Bench()
    first = generation(64, 33)
    bench.batch.submit(first, 0.0)
    bench.batch.advance(100.0)
    second = Generation(200, 1, [*first.hashes, 1, 2, 3])
    bench.batch.submit(second, 100.0)
    bench.batch.advance(200.0)
    assert second.cached_tokens == 64 + 32


def test_no_more_run_than_the_engine_allows_and_the_rest_wait_in_order() -> None:
    bench = Bench(max_num_seqs=2)
    queue = [generation(10, 2, bytes([65 + n])) for n in range(4)]
    for one in queue:
        bench.batch.submit(one, 0.0)
    bench.batch.advance(1.0)
    assert bench.batch.running == queue[:2]
    assert list(bench.batch.waiting) == queue[2:]
    bench.batch.advance(10.0)
    assert all(one.state is State.FINISHED for one in queue)


def test_a_generation_does_not_join_a_step_that_began_before_it_came() -> None:
    bench = Bench()
    early, late = generation(10, 50, b"e"), generation(10, 1, b"l")
    bench.batch.submit(early, 0.0)
    bench.batch.submit(late, 2.5)
    bench.batch.advance(3.5)
    assert late.generated_tokens == 0
    bench.batch.advance(4.0)
    assert late.generated_tokens == 1


def test_an_abort_frees_blocks_and_slot_at_once() -> None:
    bench = Bench(max_num_seqs=1)
    running, waiting = generation(100, 100, b"r"), generation(100, 100, b"w")
    bench.batch.submit(running, 0.0)
    bench.batch.submit(waiting, 0.0)
    bench.batch.advance(2.0)
    bench.batch.abort(running)
    bench.batch.abort(waiting)
    assert bench.cache.held == 0
    assert not bench.batch.running
    assert not bench.batch.waiting
    bench.batch.advance(100.0)
    assert running.generated_tokens == 2
    assert bench.batch.next_at_s is None


def test_aborting_what_has_ended_is_harmless() -> None:
    bench = Bench()
    one = generation(10, 1)
    bench.batch.submit(one, 0.0)
    bench.batch.advance(5.0)
    bench.batch.abort(one)
    assert one.state is State.FINISHED


def test_when_blocks_run_out_the_youngest_makes_room_and_finishes_later() -> None:
    bench = Bench(blocks=10)
    old, young = generation(60, 60, b"o"), generation(60, 60, b"y")
    bench.batch.submit(old, 0.0)
    bench.batch.submit(young, 0.0)
    bench.batch.advance(1000.0)
    assert bench.batch.counters.preemptions == 1
    assert (old.generated_tokens, young.generated_tokens) == (60, 60)
    assert bench.cache.held == 0


def test_who_made_room_is_the_first_to_come_back() -> None:
    bench = Bench(blocks=5)
    old, young, late = generation(32, 10, b"o"), generation(32, 10, b"y"), generation(8, 1, b"l")
    for one in (old, young, late):
        bench.batch.submit(one, 0.0)
    bench.batch.advance(1.0)
    assert bench.batch.running == [old, young]
    bench.batch.advance(2.0)
    assert bench.batch.running == [old]
    assert list(bench.batch.waiting) == [young, late]
    assert bench.batch.counters.preemptions == 1
    bench.batch.advance(100.0)
    assert all(one.state is State.FINISHED for one in (old, young, late))


def test_a_generation_that_could_never_fit_is_refused() -> None:
    bench = Bench(blocks=10)
    with pytest.raises(ValueError, match="more KV blocks"):
        bench.batch.submit(generation(150, 11), 0.0)


jobs = st.tuples(
    st.integers(1, 100),  # prompt tokens
    st.integers(0, 40),  # output tokens
    st.sampled_from([b"a", b"b", b"c"]),
    st.floats(0, 60),  # arrival
    st.one_of(st.none(), st.floats(0, 90)),  # when its client leaves
)


@settings(deadline=None)
@given(st.lists(jobs, max_size=12), st.integers(10, 30), st.integers(1, 5), st.integers(1, 64))
def test_any_load_stays_in_bounds_and_ends(
    load: list[tuple[int, int, bytes, float, float | None]], blocks: int, max_num_seqs: int, step_tokens: int
) -> None:
    bench = Bench(blocks, max_num_seqs, step_tokens)
    moments: list[tuple[float, Generation, bool]] = []
    for prompt_tokens, output_tokens, text, arrives_s, leaves_s in load:
        one = generation(prompt_tokens, output_tokens, text)
        moments.append((arrives_s, one, False))
        if leaves_s is not None and leaves_s >= arrives_s:
            moments.append((leaves_s, one, True))
    for now_s, one, leaves in sorted(moments, key=lambda moment: moment[0]):
        bench.batch.advance(now_s)
        assert len(bench.batch.running) <= max_num_seqs
        assert bench.cache.held + bench.cache.cached <= blocks
        if leaves:
            bench.batch.abort(one)
        else:
            bench.batch.submit(one, now_s)
    bench.batch.advance(1e6)
    assert all(step.tokens <= step_tokens for step in bench.loads)
    for _, one, _ in moments:
        assert one.ended
        assert one.state is State.ABORTED or one.generated_tokens == one.output_tokens
    assert bench.cache.held == 0
    assert bench.batch.next_at_s is None
