"""A request that kills its engine is ended by name; its neighbours live on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve_harness import StartServer, chat_body, gauge, stream, wait_for, whole_text

from outlast.serve.journal import STRIKES

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("order", ["poison", "throw", "hang"])
def test_a_poison_request_ends_after_three_deaths_and_its_neighbours_finish(
    start_server: StartServer, order: str
) -> None:
    server = start_server(spares=2, hang_timeout=0.4, options={"step_ms": 2})
    bodies = [chat_body(f"neighbour {i}", max_tokens=200, seed=i) for i in range(3)]
    texts = [whole_text(server, body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(stream, server, body) for body in bodies]
        poison = pool.submit(stream, server, chat_body(f"<<{order}@5>>")).result()
    assert poison.errors[0]["error"]["code"] == "request_killed_engine"
    assert "3 times" in poison.errors[0]["error"]["message"]
    assert (poison.terminals, poison.after_terminal, poison.finish) == (1, 0, [])
    assert len(poison.tokens) == 5
    for neighbour, text in zip(neighbours, texts, strict=True):
        seen = neighbour.result()
        assert seen.text == text
        assert (seen.done, seen.errors, seen.finish) == (1, [], ["length"])
    assert server.health()["takeover_count"] == STRIKES
    assert gauge(server, "outlast_poison_requests_total") == 1


def test_many_poison_requests_end_one_by_one(start_server: StartServer) -> None:
    server = start_server(spares=1)
    body = chat_body("neighbour", max_tokens=300)
    text = whole_text(server, body)
    with ThreadPoolExecutor(4) as pool:
        neighbour = pool.submit(stream, server, body)
        poison = list(pool.map(lambda i: stream(server, chat_body(f"<<poison@{i}>>")), range(3)))
    assert [seen.errors[0]["error"]["code"] for seen in poison] == ["request_killed_engine"] * 3
    assert neighbour.result().text == text
    assert server.health()["takeover_count"] <= 3 * STRIKES


def test_a_poison_request_without_stream_gets_a_status(start_server: StartServer) -> None:
    server = start_server()
    body: dict[str, Any] = chat_body("<<poison@2>>")
    with pytest.raises(AssertionError, match="request_killed_engine"):
        whole_text(server, body)


def test_a_fault_of_one_request_ends_it_alone(start_server: StartServer) -> None:
    server = start_server()
    with ThreadPoolExecutor(2) as pool:
        faulty = pool.submit(stream, server, chat_body("<<fault@4>>"))
        other = pool.submit(stream, server, chat_body())
    error = faulty.result().errors[0]["error"]
    assert error["code"] == "request_failed"
    assert "the script says fault" in error["message"]
    assert faulty.result().terminals == 1
    assert other.result().done == 1
    assert server.health()["takeover_count"] == 0


def test_after_poison_the_server_is_as_good_as_new(start_server: StartServer) -> None:
    server = start_server()
    body = chat_body()
    text = whole_text(server, body)
    stream(server, chat_body("<<poison@0>>"))
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    assert whole_text(server, body) == text
    assert server.health()["live"] == 0
