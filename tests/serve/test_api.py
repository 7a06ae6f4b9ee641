"""Validation: every wrong field is answered with 400 in the API's own form, naming the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ByteTokenizer

from outlast.serve.api import ChatBody, CompletionBody, GenerationBody, parse
from outlast.serve.errors import ApiError
from outlast.serve.jobs import Job, build_job
from outlast.serve.text import ModelInfo

MODEL = ModelInfo("m", 100, ByteTokenizer(), "fp")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def job(body: dict[str, Any] | bytes, kind: type[GenerationBody] | None = None) -> Job:
    kind = kind or (CompletionBody if isinstance(body, dict) and "prompt" in body else ChatBody)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return build_job(parse(kind, raw), MODEL, default_max_tokens=1024)


def refusal(body: dict[str, Any] | bytes, kind: type[GenerationBody] | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        job(body, kind)
    error = caught.value
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert error.param is None or error.param.split("[")[0] in error.body()["error"]["message"]
    return error


WRONG: list[tuple[str, Any]] = [
    ("model", 5), ("model", None), ("stream", "yes"), ("stream", 1), ("max_tokens", 0), ("max_tokens", -1),
    ("max_tokens", 1.5), ("max_tokens", "10"), ("max_tokens", True), ("temperature", -0.1), ("temperature", 2.1),
    ("temperature", "hot"), ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 11), ("presence_penalty", -2.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", 2.1), ("seed", 1.5), ("seed", "x"),
    ("seed", 2**64), ("stop", 5), ("stop", []), ("stop", [1]), ("stop", ""), ("stop", ["a"] * 5), ("stop", "x" * 1025),
    ("n", 0), ("n", 9), ("n", "2"), ("logit_bias", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"999": 1}),
    ("logit_bias", {"-1": 1}), ("user", 5), ("metadata", "x"), ("ignore_eos", "x"), ("stream_options", True),
    ("stream_options", {"include_usage": True}), ("nonsense", 1),
]  # fmt: skip
WRONG_IN_CHAT: list[tuple[str, Any]] = [
    ("messages", "hi"), ("messages", []), ("messages", None), ("logprobs", 1), ("top_logprobs", 21),
    ("top_logprobs", -1), ("top_logprobs", 2), ("max_completion_tokens", 0), ("prompt", "hi"), ("best_of", 2),
    ("tools", []), ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("functions", []),
    ("function_call", "auto"), ("response_format", {"type": "json_object"}), ("parallel_tool_calls", True),
    ("modalities", ["audio"]), ("audio", {}), ("prediction", {}), ("reasoning_effort", "low"), ("store", True),
    ("service_tier", "flex"), ("verbosity", "low"), ("web_search_options", {}),
]  # fmt: skip
WRONG_IN_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]), ("prompt", [1.5]), ("prompt", [-1]),
    ("prompt", [257]), ("prompt", ["a"] * 33), ("prompt", None), ("prompt", ""), ("logprobs", True), ("logprobs", 21),
    ("best_of", 2), ("echo", True), ("suffix", "x"), ("messages", []), ("max_completion_tokens", 5),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [*WRONG, *WRONG_IN_CHAT])
def test_chat_names_the_field_at_fault(field: str, value: Any) -> None:
    error = refusal({**CHAT, field: value}, ChatBody)
    assert error.status == 400
    assert error.param is not None
    assert error.param.split(".")[0] == field


@pytest.mark.parametrize(("field", "value"), [*WRONG, *WRONG_IN_COMPLETION])
def test_completion_names_the_field_at_fault(field: str, value: Any) -> None:
    error = refusal({**COMPLETION, field: value}, CompletionBody)
    assert error.status == 400
    assert error.param is not None
    assert error.param.split(".")[0] == field


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "bob"}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "extra": 1}, "messages[0].extra"),
    ],
)
def test_a_wrong_message_is_named_with_its_number(message: dict[str, Any], param: str) -> None:
    assert refusal({"model": "m", "messages": [message]}).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", 2), ("top_p", 1), ("top_k", 0), ("min_p", 1), ("seed", -(2**63)),
        ("seed", 2**64 - 1), ("stop", "x"), ("stop", ["a", "b", "c", "d"]), ("n", 8), ("logit_bias", {"5": -100}),
        ("user", "me"), ("metadata", {"a": "b"}), ("presence_penalty", -2), ("frequency_penalty", 2),
        ("repetition_penalty", 1.3), ("stream_options", None), ("ignore_eos", True), ("stop", None), ("n", None),
        ("temperature", None), ("tools", None), ("tool_choice", "none"), ("response_format", {"type": "text"}),
        ("store", False), ("max_completion_tokens", 7), ("service_tier", "auto"),
    ],
)  # fmt: skip
def test_the_edges_of_each_range_and_null_are_accepted(field: str, value: Any) -> None:
    job({**CHAT, field: value})


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).status == 400


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_body_makes_anything_but_an_api_error(body: bytes) -> None:
    assert refusal(body).status in (400, 404)


def test_defaults_leave_the_distribution_alone() -> None:
    params = job(CHAT).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)


def test_every_sampling_field_reaches_the_engine() -> None:
    given_fields = {
        "temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "seed": -1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {"9": 1, "3": -2}, "logprobs": True,
        "top_logprobs": 4, "max_tokens": 11,
    }  # fmt: skip
    request = job({**CHAT, **given_fields}).engine_request(0, key=1)
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.seed) == (0.5, 0.6, 7, 0.1, 2**64 - 1)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.2, 0.3, 1.1)
    assert p.logit_bias == ((3, -2.0), (9, 1.0))
    assert p.top_logprobs == 4
    assert request.max_tokens == 11


def test_without_a_seed_each_request_gets_its_own() -> None:
    assert job(CHAT).params.seed != job(CHAT).params.seed


def test_choices_of_one_request_draw_differently_from_one_seed() -> None:
    a_job = job({**COMPLETION, "prompt": ["a", "b"], "n": 2, "seed": 5})
    requests = [a_job.engine_request(i, i + 1) for i in range(a_job.choices)]
    assert [r.prompt for r in requests] == [(97,), (97,), (98,), (98,)]
    assert [r.params.stream for r in requests] == [0, 1, 2, 3]
    assert {r.params.seed for r in requests} == {5}


def test_an_absent_max_tokens_is_what_the_context_leaves_up_to_the_default() -> None:
    prompt = len(ByteTokenizer().encode_chat(CHAT["messages"]))
    assert job(CHAT).max_tokens == (100 - prompt,)
    body = parse(ChatBody, json.dumps(CHAT).encode())
    assert build_job(body, MODEL, default_max_tokens=5).max_tokens == (5,)


@pytest.mark.parametrize(
    "body",
    [{**COMPLETION, "max_tokens": 99}, {**COMPLETION, "prompt": "x" * 100}, {**COMPLETION, "prompt": ["a", "x" * 200]}],
)
def test_a_request_past_the_context_is_refused_by_name(body: dict[str, Any]) -> None:
    error = refusal(body)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")


def test_a_request_that_fills_the_context_exactly_is_accepted() -> None:
    assert job({**COMPLETION, "max_tokens": 98}).max_tokens == (98,)


def test_another_model_is_not_found() -> None:
    error = refusal({**CHAT, "model": "other"})
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_parts_of_text_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    prompt = bytes(job({"model": "m", "messages": messages}).prompts[0])
    assert prompt == b"[system]be[user]ab[assistant]"


def test_ignore_eos_takes_the_end_of_answer_from_the_engine() -> None:
    assert job(CHAT).stop_tokens == (256,)
    assert job({**CHAT, "ignore_eos": True}).stop_tokens == ()
