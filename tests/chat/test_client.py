"""Every way a stream can end, and that it is told truthfully."""

from __future__ import annotations

import json
import select
import time

import pytest
from saying_server import CHUNKED_HEAD, DONE, HEAD, SayingServer, error_body, event, refusal

from outlast.chat.client import ChatError, Client, End, Event, Notice, Piece, Stream
from outlast.core.errors import UsageError

BODY = {"model": "said", "messages": [{"role": "user", "content": "hi"}]}


def events(stream: Stream, seconds: float = 10.0) -> list[Event]:
    out: list[Event] = []
    deadline = time.monotonic() + seconds
    while not out or not isinstance(out[-1], End):
        assert select.select([stream], [], [], max(0, deadline - time.monotonic()))[0], "the stream does not end"
        out += stream.pending()
    stream.close()
    return out


def told(server: SayingServer, silence: float = 5.0) -> list[Event]:
    return events(Client(server.url, silence=silence).stream(BODY))


def end(found: list[Event]) -> End:
    assert isinstance(found[-1], End)
    return found[-1]


def text(found: list[Event]) -> str:
    return "".join(one.text for one in found if isinstance(one, Piece))


def test_whole_answer(saying: SayingServer) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    ours = {"outlast": {"engine": 4, "token_ids": [1, 2]}}
    saying.say(HEAD, b": keep-alive\n\n", event("", None), event("ä", **ours), event("b", "stop"), last + DONE)
    assert told(saying) == [Notice("keep-alive"), Piece("ä", 2, 4), Piece("b", 1, None), End("stop", None, 3, 2)]
    assert saying.bodies[0]["stream"] is True


def test_characters_and_events_cut_by_the_network_arrive_whole(saying: SayingServer) -> None:
    data = event("ä€😀").decode().encode() + 'data: {"choices":[{"delta":{"content":"é"}}]}\n\n'.encode()
    data += event("", "stop") + DONE
    saying.say(CHUNKED_HEAD, *(b"1\r\n%c\r\n" % byte for byte in data), b"0\r\n\r\n")
    assert text(told(saying)) == "ä€😀é"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((HEAD, event("a")), "truncated"),  # ends cleanly in the middle
        ((HEAD, event("a", "stop")), "truncated"),  # no [DONE]
        ((HEAD, event("a"), DONE), "truncated"),  # [DONE] without a finish
        ((HEAD, event("a"), b"data: {", "reset"), "truncated"),
        ((CHUNKED_HEAD, b"%x\r\n" % len(event("a")), event("a")[:-1]), "truncated"),  # in the middle of a chunk
        ((CHUNKED_HEAD, b"%x\r\n%b\r\n" % (len(event("a")), event("a"))), "truncated"),  # between two chunks
        ((HEAD, event("a"), b"data: {]\n\n"), "protocol"),
        ((HEAD, event("a"), b"data: 7\n\n"), "protocol"),
        ((HEAD, event("a"), b"data: " + error_body("it broke", "request_failed") + b"\n\n", DONE), "request_failed"),
        ((HEAD, event("a"), b'data: {"error": 5}\n\n'), "error"),
    ],
)
def test_answer_that_breaks_off_is_an_error_and_keeps_what_came(saying: SayingServer, parts: tuple, code: str) -> None:
    saying.say(*parts)
    found = told(saying)
    error = end(found).error
    assert error is not None
    assert error.code == code
    assert text(found) == "a" or code == "truncated"


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ((refusal(400, error_body("no such field", "bad")),), "bad", "no such field"),
        ((refusal(503, error_body("come back", "overloaded")),), "overloaded", "come back"),
        ((refusal(500, b"<html>oops</html>", "text/html"),), "protocol", "500 Internal Server Error. Is it"),
        ((refusal(404, b'{"error": "plain words"}'),), "error", "plain words"),
        ((refusal(200, b"{}"),), "protocol", "no event stream"),
        ((b"SSH-2.0-server\r\n",), "unreachable", "no answer"),
        (("reset",), "unreachable", "closed"),
        ((), "unreachable", "closed"),
    ],
)
def test_request_that_gets_no_stream_says_why(saying: SayingServer, parts: tuple, code: str, words: str) -> None:
    saying.say(*parts)
    error = end(told(saying)).error
    assert error is not None
    assert (error.code, words in str(error)) == (code, True)


def test_silence_has_an_end(saying: SayingServer) -> None:
    saying.say(HEAD, event("a"), None)
    error = end(told(saying, silence=0.2)).error
    assert error is not None
    assert error.code == "truncated"
    assert "0.2 s" in str(error)


@pytest.mark.parametrize("parts", [(HEAD, event("a"), None), (None,)])
def test_closing_hangs_up_at_once(saying: SayingServer, parts: tuple) -> None:
    saying.say(*parts)
    stream = Client(saying.url).stream(BODY)
    time.sleep(0.1)
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 0.5
    assert saying.hung_up.wait(5)
    stream.close()


def test_nobody_there(saying: SayingServer) -> None:
    with SayingServer() as gone:
        pass
    error = end(events(Client(gone.url).stream(BODY))).error
    assert error is not None
    assert error.code == "unreachable"
    with pytest.raises(ChatError, match="no answer from"):
        Client(gone.url).models()


def test_models_and_health(saying: SayingServer) -> None:
    client = Client(saying.url + "/v1/")
    assert [(m.id, m.context) for m in client.models()] == [("said", 100)]
    assert client.health() == {}


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://u:p@x", "http://x:port", "http://x/?q=1"])
def test_address_that_is_none_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        Client(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8321", "http://127.0.0.1:8321/", "http://127.0.0.1:8321/v1"])
def test_address_in_its_usual_forms(url: str) -> None:
    assert Client(url).url == "http://127.0.0.1:8321"
    assert Client(url).is_local


def test_key_goes_with_each_request_and_nowhere_else(saying: SayingServer) -> None:
    saying.say(HEAD, event("a", "stop"), DONE)
    client = Client(saying.url, key="sk-1~2")
    client.models()
    client.health()
    assert end(events(client.stream(BODY))).error is None
    assert [b"authorization: Bearer sk-1~2" in head.split(b"\r\n") for head in saying.heads] == [True] * 3
    Client(saying.url).models()
    assert b"authorization" not in saying.heads[-1].lower()


@pytest.mark.parametrize(
    ("url", "key", "words"),
    [
        ("http://192.0.2.1:80", "k", "not sent"),
        ("127.0.0.1:1", "", "empty"),
        ("127.0.0.1:1", "a\r\nx: y", "spaces"),
        ("127.0.0.1:1", "\u00fc", "ASCII"),
    ],
)
def test_key_that_must_not_be_sent_is_refused(url: str, key: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Client(url, key=key)
    assert Client("https://192.0.2.1", key="k").headers
