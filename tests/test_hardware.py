"""What the hardware table and a model's name predict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.hardware import (
    PROFILES,
    Hardware,
    HardwareProfile,
    decode_step_s,
    kv_capacity_tokens,
    model_shape,
    prefill_s,
)

A100 = PROFILES[Hardware.A100_80G]
LLAMA_8B = model_shape("meta-llama/Llama-3-8B-Instruct")


def test_every_listed_card_has_a_profile_and_custom_has_none() -> None:
    assert set(PROFILES) == set(Hardware) - {Hardware.CUSTOM}


def test_the_identifiers_are_those_of_the_configuration() -> None:
    assert [str(hardware) for hardware in Hardware] == [
        "a100-80g",
        "a100-40g",
        "h100-80g",
        "rtx-4090",
        "a6000",
        "custom",
    ]


def test_a_custom_profile_without_tflops_takes_a_fifth_of_its_bandwidth() -> None:
    assert HardwareProfile.custom(900, 48) == HardwareProfile(900, 180, 48, nvlink=False)


def test_a_custom_profile_keeps_the_tflops_it_is_given() -> None:
    assert HardwareProfile.custom(5300, 192, nvlink=True, compute_tflops=1307).compute_tflops == 1307


def test_four_gpus_have_four_times_the_bandwidth_compute_and_memory() -> None:
    assert A100.scaled(4) == HardwareProfile(4 * 2039, 4 * 312, 320, nvlink=True)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("meta-llama/Llama-3-8B-Instruct", 8e9, 8e9),
        ("meta-llama/Llama-3.1-70B", 70e9, 70e9),
        ("llama_13b_chat", 13e9, 13e9),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9, 0.5e9),
        ("qwen2.5-1.5b", 1.5e9, 1.5e9),
        ("gemma-3-270m-it", 270e6, 270e6),
        ("mistralai/Mixtral-8x7B-v0.1", 56e9, 14e9),
        ("Qwen/Qwen3-30B-A3B", 30e9, 3e9),
        ("some/model-7B-4bit", 7e9, 7e9),
    ],
)
def test_the_name_tells_the_parameters(name: str, total: float, active: float) -> None:
    shape = model_shape(name)
    assert (shape.parameters, shape.active_parameters) == (total, active)


@pytest.mark.parametrize(
    "name", ["", "my-model", "v2.1", "0B", "8x0b", "A3B", "4bit", "12bits", "8 bananas", "9" * 400 + "b"]
)
def test_a_name_that_tells_no_size_is_taken_for_an_8b_model(name: str) -> None:
    assert model_shape(name).parameters == 8e9


def test_more_active_parameters_than_there_are_is_taken_for_a_dense_model() -> None:
    assert model_shape("odd-3B-A22B").active_parameters == 3e9


@pytest.mark.parametrize(
    ("name", "weight_bytes"),
    [
        ("llama-8b", 2.0),
        ("llama-8b-FP8", 1.0),
        ("llama-8b-w8a8", 1.0),
        ("llama-8b-INT8", 1.0),
        ("llama-8b-GPTQ-Int8", 1.0),
        ("llama-8b-AWQ", 0.5),
        ("llama-8b-GPTQ", 0.5),
        ("llama-8b-4bit", 0.5),
        ("llama-8b-4-bit", 0.5),
        ("llama-8b-Q4_K_M", 0.5),
    ],
)
def test_the_name_tells_the_bytes_of_a_weight(name: str, weight_bytes: float) -> None:
    assert model_shape(name).weight_bytes_per_parameter == weight_bytes


@pytest.mark.parametrize(
    ("name", "layers", "width"),
    [
        ("270m", 16, 2048),
        ("7b", 32, 4096),
        ("13b", 40, 5120),
        ("72b", 80, 8192),
        ("671b", 126, 16384),
        ("mixtral-8x7b", 32, 4096),
    ],
)
def test_layers_and_width_are_those_of_the_nearest_known_size(name: str, layers: int, width: int) -> None:
    shape = model_shape(name)
    assert (shape.layers, shape.width) == (layers, width)
    assert shape.kv_bytes_per_token == 2 * layers * 1024 * 2


def test_prefill_of_an_8b_model_is_parameters_and_attention_over_reached_compute() -> None:
    flop = 1000 * (2 * 8e9 + 4 * 32 * 4096 * 500)
    assert prefill_s(A100, LLAMA_8B, 1000) == pytest.approx(flop / (0.45 * 312e12))


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_prefill_in_two_chunks_costs_what_it_costs_in_one(first: int, second: int) -> None:
    whole = prefill_s(A100, LLAMA_8B, first + second)
    chunks = prefill_s(A100, LLAMA_8B, first) + prefill_s(A100, LLAMA_8B, second, cached_tokens=first)
    assert chunks == pytest.approx(whole)


def test_a_decode_step_reads_the_weights_once_and_the_kv_of_each_request() -> None:
    weights_s = 16e9 / (0.7 * 2039e9)
    kv_s = 1000 * 131072 / (0.55 * 2039e9)
    assert decode_step_s(A100, LLAMA_8B, 4, 1000) == pytest.approx(weights_s + 4 * kv_s)


def test_a_mixture_of_experts_reads_its_active_weights_alone_and_all_of_them_in_a_large_batch() -> None:
    mixtral = model_shape("mixtral-8x7b")
    alone = decode_step_s(A100, mixtral, 1, 0)
    assert alone == pytest.approx(14e9 * 2 / (0.7 * 2039e9))
    assert decode_step_s(A100, mixtral, 256, 0) == pytest.approx(4 * alone)


def test_kv_capacity_is_the_memory_the_weights_leave() -> None:
    assert kv_capacity_tokens(A100, LLAMA_8B) == int((72e9 - 16e9) // 131072)


def test_a_model_that_does_not_fit_has_no_kv_capacity() -> None:
    assert kv_capacity_tokens(PROFILES[Hardware.RTX_4090], model_shape("llama-70b")) == 0


@given(st.text(max_size=60))
def test_any_name_has_a_usable_shape(name: str) -> None:
    shape = model_shape(name)
    assert 0 < shape.active_parameters <= shape.parameters
    assert prefill_s(A100, shape, 1) > 0
    assert decode_step_s(A100, shape, 1, 1) > 0
