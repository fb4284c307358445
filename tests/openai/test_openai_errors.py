import json

import pytest

from extproc.openai.errors import ApiError, ErrorCode, ErrorType, shown

CONTRACT = {
    "invalid_json": (400, "invalid_request_error"),
    "invalid_request": (400, "invalid_request_error"),
    "invalid_hint": (400, "invalid_request_error"),
    "admin_key_required": (401, "authentication_error"),
    "admin_key_invalid": (403, "authentication_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "body_too_large": (413, "invalid_request_error"),
    "unsupported_media_type": (415, "invalid_request_error"),
    "invalid_configuration": (422, "invalid_request_error"),
    "poisonous_request": (422, "invalid_request_error"),
    "queue_full": (429, "rate_limit_error"),
    "no_available_node": (503, "server_error"),
    "node_unavailable": (503, "server_error"),
    "admin_disabled": (503, "server_error"),
    "request_timeout": (504, "server_error"),
}


def test_every_code_of_the_contract_has_its_status_and_type() -> None:
    assert {code.value: (code.status, code.type) for code in ErrorCode} == CONTRACT


def test_a_code_is_found_by_its_string() -> None:
    assert ErrorCode._value2member_map_["queue_full"] is ErrorCode.QUEUE_FULL


def test_the_body_has_the_four_members_that_clients_read() -> None:
    error = ApiError(ErrorCode.MODEL_NOT_FOUND, "No node serves `größe`.", "model")
    assert json.loads(error.body()) == {
        "error": {
            "message": "No node serves `größe`.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_param_is_null_when_no_parameter_is_to_blame() -> None:
    assert json.loads(ApiError(ErrorCode.QUEUE_FULL, "full").body())["error"]["param"] is None


def test_an_error_can_be_raised_and_kept_as_a_value() -> None:
    error = ApiError(ErrorCode.QUEUE_FULL, "The queue is full.", retry_after_s=2)
    with pytest.raises(ApiError, match=r"The queue is full\.") as raised:
        raise error
    assert raised.value is error
    assert (error.code.type, error.retry_after_s, error.param) == (ErrorType.RATE_LIMIT, 2, None)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("meta-llama/Llama-3-8B", "meta-llama/Llama-3-8B"),
        ("größe 模型", "größe 模型"),
        ("a\nb\x00\x1b[31m", r"a\nb\x00\x1b[31m"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\ud800", r"\ud800"),
        ("'quoted'", "'quoted'"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "…"),
    ],
)
def test_a_shown_name_is_short_and_has_no_control_characters(name: str, safe: str) -> None:
    assert shown(name) == safe
