"""A client that goes away frees its work, in whatever phase it was."""

from __future__ import annotations

import http.client
import json
import os
import signal
from typing import Any

import pytest
from scripted_engine import POINT_MID_RECOVER
from serve_harness import StartServer, chat_body, connect, gauge, wait_for, whole_text

from outlast.serve.control import FaultAction
from outlast.serve.server import Server

pytestmark = pytest.mark.faults


def begin(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = connect(server)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    return connection


def assert_all_freed(server: Server) -> None:
    wait_for(lambda: server.health()["live"] == 0, "the journal is empty", 5)
    wait_for(lambda: gauge(server, "outlast_engine_running") == 0, "the engine runs nothing", 5)
    wait_for(lambda: gauge(server, "outlast_engine_kv_blocks_used") == 0, "the engine holds nothing", 5)


LONG = "x" * 1500  # at a token of prompt per step, a prefill that outlasts the test


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_disconnect_frees_the_work_within_a_step(start_server: StartServer, phase: str, streaming: bool) -> None:
    server = start_server(options={"step_ms": 5, "chunk": 1 if phase == "prefill" else 64})
    body = chat_body(LONG if phase == "prefill" else "hi", max_tokens=500, stream=streaming)
    connection = begin(server, body)
    wait_for(lambda: server.health()["live"] == 1, "the request is accepted")
    if phase == "decode":
        wait_for(lambda: gauge(server, "outlast_tokens_total") > 3, "tokens are made")
    connection.close()
    wait_for(lambda: server.health()["live"] == 0, "the request is gone", 2)
    assert_all_freed(server)
    assert gauge(server, "outlast_tokens_total") < 500


@pytest.mark.parametrize("streaming", [True, False])
def test_a_disconnect_while_waiting_for_an_engine_is_seen(start_server: StartServer, streaming: bool) -> None:
    server = start_server(wait=False, options={"start_s": 3.0})
    connection = begin(server, chat_body(stream=streaming))
    wait_for(lambda: server.health()["live"] == 1, "the request is accepted")
    connection.close()
    wait_for(lambda: server.health()["live"] == 0, "the request is gone", 2)
    assert server.health()["status"] == "starting"
    wait_for(lambda: server.engine_pids("active"), "the engine is there")
    assert_all_freed(server)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_disconnect_during_recovery_frees_the_work_after_it(start_server: StartServer, streaming: bool) -> None:
    server = start_server(recovery_timeout=3.0, options={"step_ms": 5})
    spare = wait_for(lambda: server.engine_pids("spare"), "a spare is ready")[0]
    page = server.control(spare)
    page.arm(POINT_MID_RECOVER, FaultAction.HANG)  # recovery takes three seconds, then a third engine does it
    page.close()
    connection = begin(server, chat_body(max_tokens=500, stream=streaming))
    wait_for(lambda: gauge(server, "outlast_tokens_total") > 3, "tokens are made")
    os.kill(server.engine_pids("active")[0], signal.SIGKILL)
    wait_for(lambda: server.engine_pids("recovering"), "a takeover is under way")
    connection.close()
    wait_for(lambda: server.health()["live"] == 0, "the request is gone", 2)
    assert server.health()["status"] == "recovering"
    wait_for(lambda: server.engine_pids("active"), "the takeover is done")
    assert_all_freed(server)


def test_two_hundred_disconnects_leave_nothing_and_delay_nobody(start_server: StartServer) -> None:
    server = start_server()
    text = whole_text(server, chat_body())
    for i in range(200):
        connection = begin(server, chat_body(f"request {i}", max_tokens=500, stream=bool(i % 3)))
        if i % 2:
            connection.getresponse() if i % 3 else None
        connection.close()
    assert whole_text(server, chat_body()) == text
    assert_all_freed(server)
    assert server.health()["takeover_count"] == 0


def test_a_client_that_takes_nothing_counts_as_gone(start_server: StartServer) -> None:
    server = start_server(send_timeout=0.3, options={"step_ms": 0.01})
    connections = []
    for _ in range(3):
        connection = connect(server)
        connection.connect()
        connection.sock.setsockopt(1, 8, 1)  # SOL_SOCKET, SO_RCVBUF: as small as the kernel allows
        # 20 log probabilities per token make more bytes than both sockets' buffers hold
        body = chat_body("hi", max_tokens=2000, stream=True, logprobs=True, top_logprobs=20, n=8)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        connections.append(connection)
    wait_for(lambda: server.health()["live"] >= 8, "requests are accepted")
    wait_for(lambda: server.health()["live"] == 0, "they end", 30)
    assert_all_freed(server)
    wait_for(lambda: server.open_answers() == 0, "no answer is being sent", 30)
    for connection in connections:
        connection.close()


def test_the_next_request_on_the_connection_is_not_disturbed_by_the_last(start_server: StartServer) -> None:
    server = start_server()
    connection = connect(server)
    for i in range(5):
        connection.request("POST", "/v1/chat/completions", json.dumps(chat_body(stream=bool(i % 2))))
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
    connection.close()
    assert_all_freed(server)
