"""Start, bounds, drain, end: and what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serve_harness import (
    MODEL,
    StartServer,
    alive,
    chat_body,
    children,
    gauge,
    request,
    shared_memory,
    stream,
    wait_for,
    whole_text,
)

from outlast.core.errors import OutlastError, UsageError
from outlast.serve.server import Server
from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

pytestmark = pytest.mark.faults

ASSEMBLY = "serve_harness:assemble"


def test_health_tells_roles_and_readiness(start_server: StartServer) -> None:
    server = start_server(wait=False, options={"start_s": 0.3})
    status, body = request(server, "GET", "/health")
    assert (status, json.loads(body)["status"]) == (503, "starting")
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    status, body = request(server, "GET", "/health")
    health = json.loads(body)
    assert (status, health["status"]) == (200, "ok")
    assert [engine["role"] for engine in health["engines"]] == ["active", "spare"]
    assert health["durability"]["asked"] == "process"


def test_metrics_count_what_happened(start_server: StartServer) -> None:
    server = start_server()
    whole_text(server, chat_body(max_tokens=12))
    assert gauge(server, "outlast_tokens_total") == 12
    assert gauge(server, "outlast_contradictions_total") == 0
    assert gauge(server, "outlast_live_requests") == 0
    # The supervisor lives in this process, which may hold much else.
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert own / 2 < gauge(server, "outlast_supervisor_resident_bytes") < own * 2


def test_an_engine_that_can_not_start_is_named_and_requests_fail_in_time(
    start_server: StartServer, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    server = start_server(wait=False, wait_timeout=0.5, keepalive=5, options={"start_fails_while": str(gate)})
    seen = stream(server, chat_body())
    assert (seen.status, seen.errors[0]["error"]["code"]) == (503, "no_engine")
    assert "can not start" in seen.errors[0]["error"]["message"]
    wait_for(lambda: server.health()["status"] == "failing", "the trouble shows in /health")
    assert "a test asked for it" in server.health()["last_trouble"]
    assert stream(server, chat_body()).status == 503  # at once, without waiting
    gate.unlink()
    wait_for(lambda: server.engine_pids("active"), "the engine starts after all", 20)
    assert stream(server, chat_body()).done == 1


def test_a_server_whose_engine_never_starts_says_why(tmp_path: Path) -> None:
    from serve_harness import scripted_assembly

    gate = tmp_path / "gate"
    gate.touch()
    with pytest.raises(OutlastError, match="a test asked for it"):
        Server(Settings(port=0), scripted_assembly(start_fails_while=str(gate)), start_timeout=1.0)


def test_an_engine_that_is_not_ready_in_time_is_killed(start_server: StartServer) -> None:
    server = start_server(wait=False, start_timeout=0.3, options={"start_s": 60})
    wait_for(lambda: "not ready" in server.health()["last_trouble"], "it is given up")


def test_streams_in_recovery_end_with_an_error_if_no_engine_comes(start_server: StartServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    server = start_server(spares=0, wait_timeout=0.5, options={"start_fails_while": str(gate), "step_ms": 5})

    def kill(_: object) -> None:
        if not gate.exists():
            gate.touch()
            os.kill(server.engine_pids("active")[0], signal.SIGKILL)

    seen = stream(server, chat_body(max_tokens=100), kill)
    assert seen.errors[0]["error"]["code"] == "no_engine"
    assert (seen.terminals, seen.after_terminal, seen.finish, seen.closed) == (1, 0, [], True)


def test_more_requests_than_allowed_are_refused_and_the_others_finish(start_server: StartServer) -> None:
    server = start_server(max_requests=4, options={"step_ms": 5})
    with ThreadPoolExecutor(12) as pool:
        seen = list(pool.map(lambda i: stream(server, chat_body(seed=i, max_tokens=60)), range(12)))
    refused = [s for s in seen if s.status == 503]
    assert refused
    assert {s.errors[0]["error"]["code"] for s in refused} == {"overloaded"}
    assert sum(s.done for s in seen) == 12 - len(refused) >= 4


def test_waiting_for_an_engine_is_bounded_in_number(start_server: StartServer) -> None:
    server = start_server(wait=False, max_waiting=2, options={"start_s": 1.0})
    with ThreadPoolExecutor(6) as pool:
        seen = list(pool.map(lambda i: stream(server, chat_body(seed=i)), range(6)))
    assert sum(s.done for s in seen) == 2
    assert [s.errors[0]["error"]["code"] for s in seen if s.errors] == ["overloaded"] * 4


def test_all_choices_of_a_request_are_accepted_or_none(start_server: StartServer) -> None:
    server = start_server(max_requests=4)
    assert stream(server, chat_body(n=5)).status == 503
    assert server.health()["live"] == 0
    assert stream(server, chat_body(n=4)).done == 1


def test_drain_lets_short_streams_finish_and_ends_long_ones_with_an_error(start_server: StartServer) -> None:
    server = start_server(drain=1.0, options={"step_ms": 5})
    with ThreadPoolExecutor(3) as pool:
        short = pool.submit(stream, server, chat_body(max_tokens=60))
        long = pool.submit(stream, server, chat_body(max_tokens=1500))
        wait_for(lambda: server.health()["live"] == 2, "both run")
        closer = threading.Thread(target=server.close)
        closer.start()
        wait_for(lambda: server.health()["status"] == "draining", "the drain has begun")
        late = stream(server, chat_body())
        closer.join()
    assert (late.status, late.errors[0]["error"]["code"]) == (503, "shutting_down")
    assert (short.result().done, short.result().finish) == (1, ["length"])
    assert long.result().errors[0]["error"]["code"] == "shutting_down"
    assert (long.result().terminals, long.result().after_terminal, long.result().closed) == (1, 0, True)


def test_a_taken_port_is_named(start_server: StartServer) -> None:
    server = start_server()
    with pytest.raises(OutlastError, match="can not listen"):
        start_server(port=int(server.url.rpartition(":")[2]))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_machine_asks_for_another_host(start_server: StartServer, host: str) -> None:
    with pytest.raises(OutlastError, match="another --host"):
        start_server(host=host)


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"hang_timeout": 0}, {"spares": -1}, {"durability": "host"}, {"max_requests": 0}]
)
def test_settings_without_meaning_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Settings(**wrong)


def test_settings_survive_their_json() -> None:
    settings = Settings(port=0, engine_options=(("a", "1"),), log_dir="x", durability="host")
    assert Settings.from_json(settings.to_json()) == settings
    with pytest.raises(UsageError):
        Settings.from_json('{"nonsense": 1}')


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_process_and_leaves_nothing(number: signal.Signals) -> None:
    before = shared_memory()
    server = SubprocessServer(Settings(port=0, assembly=ASSEMBLY, drain=5.0, engine_options=(("step_ms", "2"),)))
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    workers = server.engine_pids()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, chat_body(max_tokens=150))
        wait_for(lambda: server.health()["live"] == 1, "a stream runs")
        server.signal(number)
        assert server.wait(20) == 0
    assert running.result().done == 1
    assert not any(alive(pid) for pid in workers)
    assert shared_memory() == before


def test_a_second_signal_cuts_the_drain_short() -> None:
    server = SubprocessServer(Settings(port=0, assembly=ASSEMBLY, drain=60.0, engine_options=(("step_ms", "20"),)))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, chat_body(max_tokens=1500))
        wait_for(lambda: server.health()["live"] == 1, "a stream runs")
        server.signal()
        wait_for(lambda: server.health()["status"] == "draining", "the drain has begun")
        server.signal()
        assert server.wait(20) == 0
    assert running.result().errors[0]["error"]["code"] == "shutting_down"


def test_no_worker_outlives_a_killed_supervisor() -> None:
    server = SubprocessServer(Settings(port=0, assembly=ASSEMBLY, hang_timeout=60))
    stopped = wait_for(lambda: server.engine_pids("spare"), "a spare is ready")[0]
    workers = server.engine_pids()
    os.kill(stopped, signal.SIGSTOP)  # it can not see its socket close
    server.signal(signal.SIGKILL)
    server.wait(10)
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers are dead", 5)


def test_no_server_outlives_the_process_that_made_it() -> None:
    code = (
        "import os, sys; sys.path[:0] = %r; from outlast.serve.subprocess_server import SubprocessServer as S\n"
        "from outlast.serve.settings import Settings\n"
        "s = S(Settings(port=0, assembly=%r)); print(s.pid, *s.engine_pids(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code % (sys.path, ASSEMBLY)], capture_output=True, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 2, done.stderr
    wait_for(lambda: not any(alive(pid) for pid in pids), "server and workers are dead", 5)


def test_a_server_that_can_not_start_reports_its_end() -> None:
    with pytest.raises(OutlastError, match="did not start"):
        SubprocessServer(Settings(port=0, assembly="nowhere:nothing"))


def test_descriptors_do_not_grow_with_takeovers(start_server: StartServer) -> None:
    server = start_server()

    def descriptors() -> int:
        wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    for _ in range(5):
        os.kill(server.engine_pids("active")[0], signal.SIGKILL)
        wait_for(lambda: server.engine_pids("active") and server.engine_pids("spare"), "all is well again")
        time.sleep(0.05)
    assert descriptors() <= before + 1


def test_the_gateway_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.path[:0] = %r; import outlast.serve.server, outlast.serve.native; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code % (sys.path,)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_workers_import_no_server() -> None:
    code = (
        "import sys; sys.path[:0] = %r; import outlast.serve.worker; "
        "print([m for m in ('starlette', 'uvicorn', 'pydantic', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code % (sys.path,)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_sixty_four_streams_at_once_are_served_in_little_memory() -> None:
    """The bound on memory is 150 MB; it is printed with the rate, and checked loosely enough for any allocator."""
    settings = Settings(port=0, assembly=ASSEMBLY, model=MODEL, engine_options=(("step_ms", "5"),))
    with SubprocessServer(settings) as server:
        started = time.monotonic()
        with ThreadPoolExecutor(64) as pool:
            seen = list(pool.map(lambda i: stream(server, chat_body(f"stream {i}", max_tokens=100)), range(64)))
        seconds = time.monotonic() - started
        resident = gauge(server, "outlast_supervisor_resident_bytes")
        assert all((s.done, s.errors, s.finish) == (1, [], ["length"]) for s in seen)
        assert all(len(s.tokens) == 100 for s in seen)
    print(f"\n64 streams x 100 tokens: {6400 / seconds:.0f} tok/s, supervisor {resident / 1e6:.0f} MB resident")
    assert resident < 150e6
    assert children() == set()
