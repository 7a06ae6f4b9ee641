"""Engines die in every way; streams go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_engine import POINT_AFTER_COMMIT, POINT_BEFORE_COMMIT, POINT_MID_RECOVER, POINT_PREFILL
from serve_harness import MODEL, Seen, StartServer, alive, chat_body, client_of, gauge, stream, wait_for, whole_text

from outlast.serve.control import POINT_RECOVER, POINT_REPORT, POINT_STEP, FaultAction
from outlast.serve.server import Server

pytestmark = pytest.mark.faults


def kill_active(server: Server, number: signal.Signals = signal.SIGKILL) -> int:
    pid = int(wait_for(server.engine_pids, "there is an engine")[0])  # after quick kills there may be none for a moment
    os.kill(pid, number)
    return pid


def spare_ready(server: Server) -> int:
    """Pid of a spare, once there is one."""
    return int(wait_for(lambda: server.engine_pids("spare"), "a spare is ready")[0])


def active(server: Server) -> int:
    """Pid of the active engine, once there is one."""
    return int(wait_for(lambda: server.engine_pids("active"), "an engine is active")[0])


def arm(server: Server, pid: int, point: int, action: FaultAction = FaultAction.KILL, skip: int = 0) -> None:
    page = server.control(pid)
    page.arm(point, action, skip)
    page.close()


def at_tokens(*counts: int, do: object) -> object:
    """An on_chunk that calls `do` once when the stream has each number of tokens."""
    left = sorted(counts, reverse=True)

    def on_chunk(seen: Seen) -> None:
        if left and len(seen.tokens) >= left[-1]:
            left.pop()
            do()  # type: ignore[operator]

    return on_chunk


def assert_whole(seen: Seen, text: str) -> None:
    assert seen.text == text
    assert seen.finish == ["length"]
    assert (seen.done, seen.errors, seen.after_terminal, seen.closed) == (1, [], 0, True)


def test_a_killed_engine_changes_nothing_but_the_engine(start_server: StartServer) -> None:
    server = start_server(spares=3, options={"step_ms": 5})
    body = chat_body(max_tokens=160)
    text = whole_text(server, body)
    wait_for(lambda: len(server.engine_pids("spare")) == 3, "three spares are ready")
    seen = stream(server, body, at_tokens(10, 60, 110, do=lambda: kill_active(server)))
    assert_whole(seen, text)
    engines = [c["outlast"]["engine"] for c in seen.chunks if "outlast" in c]
    assert engines == sorted(engines)
    assert set(engines) == {1, 2, 3, 4}
    assert any("takes over" in comment for comment in seen.comments)
    health = server.health()
    assert health["takeover_count"] == 3
    assert all(t["restored"] == 1 and t["recomputed"] == 0 for t in health["takeovers"])
    assert gauge(server, "outlast_contradictions_total") == 0


@pytest.mark.parametrize("streams", [1, 4, 8])
def test_streams_under_random_kills_equal_undisturbed_ones(start_server: StartServer, streams: int) -> None:
    server = start_server(options={"step_ms": 1})
    bodies = [
        chat_body(f"stream {i}", max_tokens=150, seed=i, temperature=i % 2, n=1 + i % 2) for i in range(streams)
    ]  # fmt: skip
    undisturbed = [stream(server, body) for body in bodies]
    rng = random.Random(streams)
    stop = threading.Event()
    kills = 0

    def killer() -> None:
        nonlocal kills
        while not stop.wait(rng.uniform(0.005, 0.12)):
            kill_active(server)
            kills += 1
            wait_for(lambda: server.engine_pids("active") or stop.is_set(), "an engine is active again")

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        with ThreadPoolExecutor(streams) as pool:
            disturbed = list(pool.map(lambda body: stream(server, body), bodies))
    finally:
        stop.set()
        thread.join()
    assert kills >= 1
    for before, after in zip(undisturbed, disturbed, strict=True):
        by_choice = [[], []] * 2
        assert (after.done, after.errors, after.after_terminal) == (1, [], 0)
        for seen, out in ((before, by_choice[0]), (after, by_choice[1])):
            for index in (0, 1):
                out.append([
                    t for c in seen.chunks if "outlast" in c and c["choices"][0]["index"] == index
                    for t in c["outlast"]["token_ids"]
                ])  # fmt: skip
        assert by_choice[0] == by_choice[1]
        assert sorted(after.finish) == sorted(before.finish)
    assert gauge(server, "outlast_contradictions_total") == 0


@pytest.mark.parametrize("action", list(FaultAction))
@pytest.mark.parametrize("point", [POINT_STEP, POINT_BEFORE_COMMIT, POINT_AFTER_COMMIT, POINT_REPORT, POINT_PREFILL])
def test_a_fault_anywhere_in_a_step_changes_nothing(start_server: StartServer, point: int, action: FaultAction) -> None:
    server = start_server(hang_timeout=0.4)
    body = chat_body("x" * 200, max_tokens=20)
    text = whole_text(server, body)
    spare_ready(server)
    arm(server, active(server), point, action, skip=2)
    assert_whole(stream(server, body), text)
    assert server.health()["takeover_count"] == 1
    assert gauge(server, "outlast_contradictions_total") == 0


def test_a_stopped_engine_is_fenced_and_replaced(start_server: StartServer) -> None:
    server = start_server(hang_timeout=0.5)
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    spare_ready(server)
    stopped: list[int] = []
    seen = stream(server, body, at_tokens(20, do=lambda: stopped.append(kill_active(server, signal.SIGSTOP))))
    assert_whole(seen, text)
    assert not alive(stopped[0])
    assert "no sign of life" in server.health()["takeovers"][0]["cause"]


def test_an_exception_of_the_engine_is_named_and_survived(start_server: StartServer) -> None:
    server = start_server()
    body = chat_body(max_tokens=20)
    text = whole_text(server, body)
    spare_ready(server)
    arm(server, active(server), POINT_STEP, FaultAction.RAISE, skip=5)
    assert_whole(stream(server, body), text)
    assert "fault point" in server.health()["takeovers"][0]["cause"]


@pytest.mark.parametrize("action", list(FaultAction))
@pytest.mark.parametrize("point", [POINT_RECOVER, POINT_MID_RECOVER])
def test_a_death_during_recovery_is_survived(start_server: StartServer, point: int, action: FaultAction) -> None:
    server = start_server(recovery_timeout=0.5, spares=2)
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    wait_for(lambda: len(server.engine_pids("spare")) == 2, "two spares are ready")
    for pid in server.engine_pids("spare")[:1]:
        arm(server, pid, point, action)
    assert_whole(stream(server, body, at_tokens(20, do=lambda: kill_active(server))), text)
    assert server.health()["takeover_count"] == 2


def test_a_log_that_kills_every_takeover_is_given_up_for_a_recomputation(start_server: StartServer) -> None:
    server = start_server(spares=4)
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    wait_for(lambda: len(server.engine_pids("spare")) == 4, "four spares are ready", 30)
    for pid in server.engine_pids("spare")[:3]:
        arm(server, pid, POINT_MID_RECOVER)
    assert_whole(stream(server, body, at_tokens(20, do=lambda: kill_active(server))), text)
    last = server.health()["takeovers"][-1]
    assert (last["restored"], last["recomputed"]) == (0, 1)


def test_a_killed_spare_is_replaced_and_nobody_notices(start_server: StartServer) -> None:
    server = start_server()
    spare = spare_ready(server)
    body = chat_body(max_tokens=40)
    seen = stream(server, body, at_tokens(10, do=lambda: os.kill(spare, signal.SIGKILL)))
    assert seen.comments == []
    assert seen.done == 1
    assert wait_for(lambda: server.engine_pids("spare"), "a new spare is ready")[0] != spare
    assert server.health()["takeover_count"] == 0


def test_a_stopped_spare_is_replaced(start_server: StartServer) -> None:
    server = start_server(hang_timeout=0.4)
    spare = spare_ready(server)
    os.kill(spare, signal.SIGSTOP)
    wait_for(lambda: server.engine_pids("spare") not in ([], [spare]), "a new spare is ready")


def test_with_engine_and_spare_killed_streams_wait_for_a_new_one(start_server: StartServer) -> None:
    server = start_server(options={"start_s": 0.6}, keepalive=0.1)
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    spare = spare_ready(server)

    def kill_both() -> None:
        os.kill(spare, signal.SIGKILL)
        kill_active(server)

    seen = stream(server, body, at_tokens(20, do=kill_both))
    assert_whole(seen, text)
    assert seen.comments.count("keep-alive") >= 3  # the socket is held open meanwhile


def test_without_spares_a_new_engine_is_started(start_server: StartServer) -> None:
    server = start_server(spares=0)
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    assert_whole(stream(server, body, at_tokens(20, do=lambda: kill_active(server))), text)


def test_recovery_without_the_log_recomputes_and_still_contradicts_nothing(start_server: StartServer) -> None:
    server = start_server(recovery="reprefill")
    body = chat_body(max_tokens=60)
    text = whole_text(server, body)
    spare_ready(server)
    assert_whole(stream(server, body, at_tokens(20, do=lambda: kill_active(server))), text)
    assert server.health()["takeovers"][0]["restored"] == 0


def test_a_takeover_keeps_stop_strings_and_usage(start_server: StartServer) -> None:
    """A death at each token of an answer whose stop string spans tokens."""
    server = start_server()
    expected = None
    for at in range(len("one ENEND")):
        spare_ready(server)
        arm(server, active(server), POINT_AFTER_COMMIT, skip=at)
        body = chat_body("<<say:one ENENDxx>>", stop=["END"], stream_options={"include_usage": True})
        seen = stream(server, body)
        assert seen.text == "one EN"
        assert seen.finish == ["stop"]
        usage = seen.chunks[-1]["usage"]
        expected = expected or usage
        assert usage == expected
        assert usage["completion_tokens"] == len("one ENEND")


def test_a_death_between_the_last_token_and_its_report_loses_nothing(start_server: StartServer) -> None:
    server = start_server()
    body = chat_body(max_tokens=5)
    text = whole_text(server, body)
    spare_ready(server)
    arm(server, active(server), POINT_REPORT, skip=5)  # one part of the prompt, then five tokens
    assert_whole(stream(server, body), text)
    assert server.health()["takeover_count"] == 1


def test_requests_without_stream_survive_too(start_server: StartServer) -> None:
    server = start_server(options={"step_ms": 4})
    body = chat_body(max_tokens=80)
    text = whole_text(server, body)
    spare_ready(server)
    timer = threading.Timer(0.15, lambda: kill_active(server))
    timer.start()
    assert whole_text(server, body) == text
    timer.join()
    assert server.health()["takeover_count"] == 1


def test_a_request_sent_while_no_engine_is_there_waits_for_one(start_server: StartServer) -> None:
    server = start_server(spares=0, options={"start_s": 0.5})
    body = chat_body(max_tokens=10)
    text = whole_text(server, body)
    kill_active(server)
    wait_for(lambda: not server.engine_pids("active"), "the death is seen")
    assert whole_text(server, body) == text


def test_a_contradicting_engine_is_never_believed(start_server: StartServer) -> None:
    server = start_server()
    with ThreadPoolExecutor(2) as pool:
        lying = pool.submit(stream, server, chat_body("<<lie@10>>"))
        honest = pool.submit(stream, server, chat_body(max_tokens=60))
    seen = lying.result()
    assert seen.errors[0]["error"]["code"] == "contradiction"
    assert (seen.terminals, seen.after_terminal, seen.finish) == (1, 0, [])
    assert len(seen.tokens) == 10
    assert honest.result().done == 1
    assert gauge(server, "outlast_contradictions_total") == 1


def test_the_openai_client_sees_no_error_through_three_kills(start_server: StartServer) -> None:
    server = start_server(spares=3, options={"step_ms": 5})
    common = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 130, "seed": 8}
    client = client_of(server)
    text = client.chat.completions.create(**common).choices[0].message.content
    wait_for(lambda: len(server.engine_pids("spare")) == 3, "three spares are ready")
    got = ""
    for chunk in client.chat.completions.create(**common, stream=True):
        got += chunk.choices[0].delta.content
        if len(got) in (20, 50, 80):
            kill_active(server)
    assert got == text
    assert chunk.choices[0].finish_reason == "length"


def test_what_a_killed_engine_started_dies_with_it(start_server: StartServer, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    server = start_server(options={"helper_pid_file": str(mark)})
    helper = int(mark.read_text())
    assert alive(helper)
    kill_active(server)
    wait_for(lambda: not alive(helper), "the helper is dead")
