"""How long the simulated engine's steps take."""

import pytest

from extproc.hardware import PROFILES, Hardware, decode_step_s, model_shape, prefill_s
from extproc.simulator.roofline import StepLoad, step_s

A100 = PROFILES[Hardware.A100_80G]
H100 = PROFILES[Hardware.H100_80G]
LLAMA = model_shape("llama-8b")


def load(*work: tuple[int, int]) -> StepLoad:
    total = StepLoad()
    for tokens, computed in work:
        total.add(tokens, computed)
    return total


def test_a_prefill_takes_about_what_the_router_predicts() -> None:
    predicted = prefill_s(A100, LLAMA, 2048)
    assert step_s(A100, LLAMA, load((2048, 0))) == pytest.approx(predicted, rel=0.3)


def test_a_decode_step_takes_about_what_the_router_predicts() -> None:
    predicted = decode_step_s(A100, LLAMA, 32, 2000)
    assert step_s(A100, LLAMA, load(*[(1, 2000)] * 32)) == pytest.approx(predicted, rel=0.3)


def test_one_more_request_costs_a_decode_step_far_less_than_a_step_of_its_own() -> None:
    alone = step_s(A100, LLAMA, load((1, 1000)))
    assert step_s(A100, LLAMA, load((1, 1000), (1, 1000))) < 1.1 * alone


def test_better_hardware_is_faster_at_both() -> None:
    for work in ((2048, 0), (1, 4000)):
        assert step_s(H100, LLAMA, load(work)) < step_s(A100, LLAMA, load(work))


def test_a_later_chunk_of_a_prompt_costs_more_than_the_first() -> None:
    assert step_s(A100, LLAMA, load((2048, 30_000))) > step_s(A100, LLAMA, load((2048, 0)))


def test_a_mixture_of_experts_decodes_alone_as_fast_as_its_active_part() -> None:
    mixture, dense = model_shape("qwen-30b-a3b"), model_shape("llama-3b")
    assert step_s(A100, mixture, load((1, 0))) == pytest.approx(step_s(A100, dense, load((1, 0))))
