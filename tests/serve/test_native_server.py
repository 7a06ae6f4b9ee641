"""The server with the native engine and a small random model: nothing on the way is scripted."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serve_harness import Seen, gauge, request, stream, wait_for

from outlast.core.errors import NotPossibleHere
from outlast.serve.assembly import assemble
from outlast.serve.control import POINT_STEP, FaultAction
from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

pytestmark = pytest.mark.faults

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_model.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", TINY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_model"] = module
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    module.write_tiny_model(path)
    return path


def settings(model: Path, **more: Any) -> Settings:
    # One token a step: faults are set by steps. tests/faults has kills with guessed tokens.
    plain = (("speculate", "0"),)
    return Settings(model=str(model), port=0, hang_timeout=1.0, kv_tokens=8192, engine_options=plain, **more)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[SubprocessServer]:
    with SubprocessServer(settings(model)) as server:
        yield server


def body(i: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {i} " + "and so on " * (7 * i)}]
    fields = {"temperature": i % 2, "seed": i, "max_tokens": 150, "ignore_eos": True}
    return {"model": "tiny", "messages": messages, **fields, **more}


def arm(server: SubprocessServer, role: str, steps: int, action: FaultAction = FaultAction.KILL) -> None:
    """Let the worker of that role die after so many steps."""
    page = server.control(wait_for(lambda: server.engine_pids(role), f"a worker is {role}")[0])
    page.arm(POINT_STEP, action, skip=steps)
    page.close()


@pytest.mark.parametrize("action", [FaultAction.KILL, FaultAction.HANG])
@pytest.mark.parametrize("streams", [1, 4])
def test_streams_of_a_dying_engine_equal_undisturbed_ones(
    server: SubprocessServer, streams: int, action: FaultAction
) -> None:
    undisturbed = [stream(server, body(i)) for i in range(streams)]
    rng = random.Random(streams)
    before = server.health()["takeover_count"]
    arm(server, "spare", rng.randrange(40, 70), action)
    arm(server, "active", rng.randrange(40, 70), action)
    with ThreadPoolExecutor(streams) as pool:
        disturbed = list(pool.map(lambda i: stream(server, body(i)), range(streams)))
    for a, b in zip(undisturbed, disturbed, strict=True):
        assert b.tokens == a.tokens
        assert b.text == a.text
        assert (b.done, b.errors, b.after_terminal, b.finish) == (1, [], 0, ["length"])
    health = server.health()
    assert health["takeover_count"] == before + 2
    # A request that came just before the death has nothing in the log yet, and counts as recomputed.
    assert all(t["restored"] > 0 for t in health["takeovers"][before:])
    assert streams > 1 or all(t["recomputed"] == 0 for t in health["takeovers"][before:])
    assert gauge(server, "outlast_contradictions_total") == 0


@pytest.mark.parametrize("more", [{"checkpoint": False}, {"recovery": "reprefill", "spares": 0}])
def test_the_baselines_without_a_log_continue_too(model: Path, more: dict[str, Any]) -> None:
    with SubprocessServer(settings(model, **more)) as server:
        undisturbed = stream(server, body(2))
        arm(server, "active", 60)
        disturbed = stream(server, body(2))
        assert disturbed.tokens == undisturbed.tokens
        assert disturbed.done == 1
        assert server.health()["takeovers"][0]["restored"] == 0


def test_a_log_in_a_folder_is_used_and_continued_by_the_next_server(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    for _ in range(2):
        with SubprocessServer(settings(model, durability="host", log_dir=str(folder))) as server:
            undisturbed = stream(server, body(1, max_tokens=60))
            wait_for(lambda server=server: server.engine_pids("spare"), "a spare is ready")
            arm(server, "active", 30)
            disturbed = stream(server, body(1, max_tokens=60))
            assert disturbed.tokens == undisturbed.tokens
            assert server.health()["takeovers"][0]["restored"] == 1
        assert list(folder.iterdir())


def test_a_disconnected_client_frees_blocks_of_the_pool(server: SubprocessServer) -> None:
    def leave(seen: Seen) -> None:
        if len(seen.tokens) >= 3:
            raise ConnectionAbortedError

    for i in range(5):
        with pytest.raises(ConnectionAbortedError):
            stream(server, body(i, max_tokens=1500), leave)
    wait_for(lambda: gauge(server, "outlast_engine_kv_blocks_used") == 0, "all blocks are free")


def test_a_conversation_past_the_context_is_refused(server: SubprocessServer) -> None:
    status, answer = request(server, "POST", "/v1/chat/completions", body(0, max_tokens=100_000))
    assert status == 400
    assert b"context_length_exceeded" in answer


def test_a_pool_larger_than_the_machine_is_refused_with_both_sizes(model: Path) -> None:
    with pytest.raises(NotPossibleHere, match=r"takes [\d,]+ MiB, the weights [\d,]+ MiB, and the limit is [\d,]+"):
        assemble(Settings(model=str(model), port=0, kv_tokens=1 << 40))
