"""Messages and answers: a full context, takeovers, stopping."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from saying_server import DONE, HEAD, SayingServer, error_body, event, refusal
from serve_harness import StartServer, gauge, wait_for

from outlast.chat.client import Client, Model, Piece
from outlast.chat.conversation import Conversation, Turn
from outlast.chat.exchange import Dropped, Exchange, Options, Takeover
from outlast.chat.kill import kill_engine
from outlast.chat.own_server import OwnServer, settings_for
from outlast.chat.session import Session
from outlast.core.errors import NotPossibleHere, OutlastError, UsageError
from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

TOO_LONG = refusal(400, error_body("the model's context holds 100 tokens", "context_length_exceeded"))


def open_chat(url: str, **options: Any) -> Session:
    session = Session(Options(**{"seed": 1, **options}), url=url)
    session.open()
    return session


def finish(exchange: Exchange, on_update: Callable[[Any], None] = lambda _: None) -> list[Any]:
    out = []
    while not exchange.done:
        for update in exchange.wait():
            out.append(update)
            on_update(update)
    return out


def test_conversation_goes_along_and_grows(saying: SayingServer) -> None:
    session = open_chat(saying.url, temperature=0.3)
    for word in ("one", "two"):
        saying.say(HEAD, event(word), event("", "stop"), DONE)
        exchange = session.ask(f"say {word}")
        finish(exchange)
        session.settle(exchange)
    assert saying.bodies[1]["messages"] == [
        {"role": "user", "content": "say one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "say two"},
    ]
    assert (saying.bodies[1]["temperature"], saying.bodies[1]["seed"]) == (0.3, 1)
    assert (session.answers, session.tokens) == (2, 2)


def test_full_context_forgets_the_oldest_turns_and_says_so(saying: SayingServer) -> None:
    session = open_chat(saying.url)
    session.conversation.turns = [Turn(str(i), "x") for i in range(8)]
    saying.say(TOO_LONG)
    saying.say(TOO_LONG)
    saying.say(HEAD, event("yes"), event("", "stop"), DONE)
    exchange = session.ask("and now?")
    updates = finish(exchange)
    assert [type(update) for update in updates[:2]] == [Dropped, Piece]
    assert updates[0].turns == exchange.answer.dropped == 4
    assert [turn.said for turn in session.conversation.turns] == ["4", "5", "6", "7", "and now?"]


def test_message_that_alone_is_too_long_costs_nothing_of_the_conversation(saying: SayingServer) -> None:
    session = open_chat(saying.url)
    session.conversation.turns = before = [Turn("a", "b"), Turn("c", "d")]
    for _ in range(4):  # two turns, one try without a limit, and the last
        saying.say(TOO_LONG)
    exchange = session.ask("long " * 100)
    finish(exchange)
    assert exchange.answer.error is not None
    assert "context holds 100" in str(exchange.answer.error)
    assert exchange.answer.dropped == 0
    assert session.conversation.turns == before == [Turn("a", "b"), Turn("c", "d")]
    assert [body.get("max_tokens") for body in saying.bodies] == [25, 25, 25, None]


def test_real_server_takes_what_is_left_of_a_conversation_past_its_context(start_server: StartServer) -> None:
    session = open_chat(start_server().url, max_tokens=300)
    session.conversation.turns = [Turn("q" * 100, "a" * 100) for _ in range(9)]
    exchange = session.ask("<<say:still here>>")
    finish(exchange)
    assert (exchange.answer.text, exchange.answer.error) == ("still here", None)
    assert exchange.answer.dropped == 3


@pytest.mark.parametrize("code", ["truncated", "request_failed"])
def test_what_came_of_a_broken_answer_is_kept(saying: SayingServer, code: str) -> None:
    session = open_chat(saying.url)
    broken = b"data: " + error_body("broken", "request_failed") + b"\n\n"
    saying.say(HEAD, event("half"), *([broken] if code == "request_failed" else []))
    exchange = session.ask("tell")
    finish(exchange)
    assert exchange.answer.error is not None
    assert exchange.answer.error.code == code
    assert session.conversation.turns == [Turn("tell", "half", whole=False)]


def test_message_without_any_answer_is_not_kept(saying: SayingServer) -> None:
    session = open_chat(saying.url)
    saying.say(refusal(503, error_body("later", "overloaded")))
    exchange = session.ask("tell")
    finish(exchange)
    assert session.conversation.turns == []


@pytest.mark.faults
def test_stopping_frees_the_work_and_keeps_the_text(start_server: StartServer) -> None:
    server = start_server(options={"step_ms": 20})
    session = open_chat(server.url, max_tokens=1000)
    exchange = session.ask("hello")
    while not exchange.answer.tokens:
        exchange.wait()
    exchange.stop()
    assert session.conversation.turns == [Turn("hello", exchange.answer.text, whole=False)]
    wait_for(lambda: gauge(server, "outlast_live_requests") == 0, "the request is freed", 5)


@pytest.mark.faults
def test_takeover_before_the_first_token_is_noticed(start_server: StartServer) -> None:
    server = start_server(options={"step_ms": 50, "chunk": 4})
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    session = open_chat(server.url, max_tokens=5)
    exchange = session.ask("a prompt that takes a while")
    wait_for(lambda: gauge(server, "outlast_live_requests") == 1, "the request is there")
    exchange.killed(session.kill_engine().engine)
    finish(exchange)
    assert [(takeover.killed, takeover.at_token) for takeover in exchange.answer.takeovers] == [(True, 0)]


@pytest.mark.faults
def test_takeover_is_noticed_with_its_time(start_server: StartServer) -> None:
    server = start_server(options={"step_ms": 5})
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    session = open_chat(server.url, max_tokens=100)
    exchange = session.ask("hello")

    def kill(update: Any) -> None:
        if exchange.answer.tokens == 20 and isinstance(update, Piece):
            victim = session.kill_engine()
            assert victim.spare
            exchange.killed(victim.engine)

    updates = finish(exchange, kill)
    session.settle(exchange)
    (takeover,) = [update for update in updates if isinstance(update, Takeover)]
    assert takeover.killed
    assert 20 <= takeover.at_token < 100
    assert 0 < takeover.milliseconds < 15000
    assert exchange.answer.whole
    assert "1 in answers" in session.stats()["takeovers"]
    calm = session.ask("again")
    finish(calm)
    assert calm.answer.takeovers == []


@pytest.fixture(scope="module")
def builtin_server(builtin_model: Path) -> Iterator[SubprocessServer]:
    with SubprocessServer(Settings(model=str(builtin_model), port=0, kv_tokens=8192, drain=0.2)) as server:
        yield server


@pytest.mark.model
@pytest.mark.faults
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_answer_of_a_killed_engine_equals_an_undisturbed_one(
    builtin_server: SubprocessServer, temperature: float
) -> None:
    server = builtin_server
    texts = []
    for kill_at in (None, 15):
        wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
        session = open_chat(server.url, temperature=temperature, max_tokens=60)
        exchange = session.ask("Tell me a story about a lighthouse.")
        while not exchange.done:
            exchange.wait()
            if kill_at is not None and exchange.answer.tokens >= kill_at and not exchange.done:
                exchange.killed(session.kill_engine().engine)
                kill_at = None
        assert exchange.answer.whole
        texts.append((exchange.answer.text, exchange.answer.tokens, len(exchange.answer.takeovers)))
    assert texts[0][:2] == texts[1][:2]
    assert [takeovers for _, _, takeovers in texts] == [0, 1]


def test_only_an_engine_is_killed_whatever_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("127.0.0.1:1")
    monkeypatch.setattr(client, "health", lambda: {"engines": [{"role": "active", "pid": os.getpid()}]})
    with pytest.raises(NotPossibleHere, match="no engine of outlast"):
        kill_engine(client)
    monkeypatch.setattr(client, "health", lambda: {"engines": "none"})
    with pytest.raises(OutlastError, match="no engine to kill"):
        kill_engine(client)
    with pytest.raises(NotPossibleHere, match="another machine"):
        kill_engine(Client("http://192.0.2.1"))


def test_model_is_chosen_by_name(saying: SayingServer) -> None:
    session = Session(Options(), url=saying.url, model="other")
    with pytest.raises(UsageError, match="It has: said"):
        session.open()


def test_server_that_does_not_start_says_its_own_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all")
    with pytest.raises(OutlastError, match="the server did not start") as caught:
        OwnServer(settings_for(str(broken)))
    assert "broken.gguf" in str(caught.value)
    assert "above" not in str(caught.value)


def test_small_context_leaves_room_for_a_question(saying: SayingServer) -> None:
    saying.say(HEAD, event("a", "stop"), DONE)
    finish(Exchange(Client(saying.url), Model("said", 100), Conversation(), "hi", Options()))
    assert saying.bodies[0]["max_tokens"] == 25
