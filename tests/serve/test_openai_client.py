"""The real `openai` client against the server, undisturbed."""

from __future__ import annotations

import json

import openai
import pytest
from serve_harness import MODEL, chat_body, client_of, gauge, request, stream, wait_for, whole_text

from outlast.serve.server import Server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def test_stream_and_whole_answer_hold_the_same_text(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "seed": 3}
    whole = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True))
    assert "".join(c.choices[0].delta.content for c in chunks) == whole.choices[0].message.content
    assert len(whole.choices[0].message.content) == 30
    assert whole.choices[0].finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert {c.system_fingerprint for c in chunks} == {whole.system_fingerprint} == {"fp-scripted"}
    assert whole.usage.completion_tokens == 30
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 30


def test_usage_comes_in_a_last_chunk_without_choices_if_asked(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "stream": True}
    with_usage = list(client.chat.completions.create(**common, stream_options={"include_usage": True}))
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage.completion_tokens == 5
    assert all(c.usage is None for c in with_usage[:-1])
    assert all(c.usage is None for c in client.chat.completions.create(**common))


def test_choices_of_one_request_differ_and_are_all_complete(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "seed": 3, "n": 3}
    whole = client.chat.completions.create(**common)
    texts = [c.message.content for c in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 60
    streamed = ["", "", ""]
    finishes = []
    for chunk in client.chat.completions.create(**common, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content
        finishes += [choice.finish_reason] if choice.finish_reason else []
    assert streamed == texts
    assert finishes == ["length"] * 3


def test_chat_log_probabilities_cover_every_token(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, "seed": 1}
    whole = client.chat.completions.create(**common)
    content = whole.choices[0].logprobs.content
    assert "".join(t.token for t in content) == whole.choices[0].message.content
    assert [bytes(t.bytes) for t in content] == [t.token.encode() for t in content]
    assert all(t.logprob == -0.5 and len(t.top_logprobs) == 2 for t in content)
    opening, *chunks = client.chat.completions.create(**common, stream=True)
    assert opening.choices[0].logprobs is None
    streamed = [t.token for c in chunks for t in c.choices[0].logprobs.content]
    assert streamed == [t.token for t in content]


def test_completion_log_probabilities_have_the_older_form(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="ab", max_tokens=4, logprobs=2, seed=1)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4


def test_prompts_as_text_texts_and_tokens_agree(client: openai.OpenAI) -> None:
    common = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    one = client.completions.create(prompt="abc", **common).choices[0].text
    assert client.completions.create(prompt=[97, 98, 99], **common).choices[0].text == one
    several = client.completions.create(prompt=["abc", "x"], **common)
    assert several.choices[0].text == one
    assert several.usage.prompt_tokens == 4
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["abc", "x"], stream=True, **common):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in several.choices]


def test_an_end_of_answer_token_ends_with_stop_and_is_counted_but_not_shown(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "<<say:hi there>>"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=50)
    assert answer.choices[0].message.content == "hi there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("hi there") + 1


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_string_across_tokens_is_never_shown(client: openai.OpenAI, server: Server, streaming: bool) -> None:
    common = {
        "model": MODEL, "messages": [{"role": "user", "content": "<<say:one two ENEND three>>"}],
        "stop": ["END", "zzz"], "max_tokens": 100,
    }  # fmt: skip
    if streaming:
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**common, stream=True, stream_options=options))
        text = "".join(c.choices[0].delta.content for c in chunks if c.choices)
        finish, usage = [c.choices[0].finish_reason for c in chunks if c.choices][-1], chunks[-1].usage
    else:
        answer = client.chat.completions.create(**common)
        text, finish, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert text == "one two EN"
    assert finish == "stop"
    assert usage.completion_tokens == len("one two ENEND")


def test_a_stop_string_ends_the_work_of_the_engine_too(server: Server) -> None:
    said = "<<say:END" + "x" * 1400 + ">>"
    assert whole_text(server, chat_body(said, stop="END", max_tokens=500)) == ""
    # The engine may be a step ahead; nothing after that.
    wait_for(lambda: gauge(server, "outlast_engine_kv_blocks_used") == 0, "the engine holds nothing", 5)
    assert server.health()["live"] == 0
    assert gauge(server, "outlast_engine_stepped_tokens") < 100


def test_text_kept_back_for_a_stop_string_is_shown_when_the_answer_ends(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "<<say:almost EN>>"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, stop="END", max_tokens=50)
    assert answer.choices[0].message.content == "almost EN"


def test_characters_of_several_tokens_come_whole(client: openai.OpenAI) -> None:
    text = "grün 漢字 🙂 end"
    chunks = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": f"<<say:{text}>>"}], max_tokens=50, stream=True
    )
    parts = [c.choices[0].delta.content for c in chunks]
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


def test_a_character_cut_by_the_token_limit_is_shown_as_replacement(server: Server) -> None:
    assert whole_text(server, chat_body("<<say:漢>>", max_tokens=2)) == "\ufffd"


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_reach_the_client_as_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "<<refuse>>"}], stream=True)
    assert refused.value.code == "request_too_large"


def test_other_paths_methods_and_bodies_are_answered_in_the_same_form(server: Server) -> None:
    for method, path, body, status in [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b" " * (5 << 20), 413),
    ]:
        got, answer = request(server, method, path, body)
        assert got == status
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


def test_every_chunk_names_its_engine_and_tokens(server: Server) -> None:
    seen = stream(server, chat_body(max_tokens=7))
    assert bytes(seen.tokens).decode() == seen.text
    assert {c["outlast"]["engine"] for c in seen.chunks[1:]} == {1}


def test_a_stream_ends_with_one_terminal_event_and_nothing_after_it(server: Server) -> None:
    seen = stream(server, chat_body())
    assert (seen.done, seen.errors, seen.after_terminal, seen.closed) == (1, [], 0, True)
    assert seen.finish == ["length"]
