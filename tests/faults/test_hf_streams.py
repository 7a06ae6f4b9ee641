"""The server with the transformers engine: streams survive SIGKILL at random moments, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serve_harness as harness
import streams
from tiny_folder import write_tiny_folder

from outlast.serve.control import POINT_STEP, FaultAction
from outlast.serve.settings import ENGINES, Settings
from outlast.serve.subprocess_server import SubprocessServer

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.faults, pytest.mark.torch]


def start(model: Path | str, **more: Any) -> SubprocessServer:
    """The hang timeout is that of a busy machine: a worker that loads torch next to it takes both cores."""
    settings: dict[str, Any] = {"port": 0, "hang_timeout": 5.0, "kv_tokens": 16384, **more}
    return SubprocessServer(Settings(assembly=ENGINES["transformers"], model=str(model), **settings))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubprocessServer]:
    with start(write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny"), spares=1) as running:
        yield running


def test_streams_are_identical_under_kills(server: SubprocessServer) -> None:
    tally = streams.kill_rounds(server, "tiny", kills=2, streams=4, tokens=200, seed=4, between=(0.2, 1.0))
    assert tally.differing == []
    assert tally.kills >= 2
    taken = server.health()["takeovers"]
    assert sum(t["restored"] for t in taken) > 0
    assert harness.gauge(server, "outlast_contradictions_total") == 0


def test_a_hang_inside_a_step_is_noticed_and_survived(server: SubprocessServer) -> None:
    asked = [streams.Wish("and so it goes", 120, 1.0, 7, (("ignore_eos", True),))]
    expected = streams.run_all(server, "tiny", asked)
    harness.wait_for(lambda: server.engine_pids("spare"), "a spare is ready", 120)
    page = server.control(server.engine_pids("active")[0])
    page.arm(POINT_STEP, FaultAction.HANG, skip=30)
    page.close()
    assert streams.run_all(server, "tiny", asked) == expected
    assert "sign of life" in server.health()["takeovers"][-1]["cause"]


def test_a_request_past_the_context_is_refused(server: SubprocessServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}
    status, answer = harness.request(server, "POST", "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["code"] == "context_length_exceeded"


def test_a_disconnected_client_frees_its_room(server: SubprocessServer) -> None:
    def leave(seen: harness.Seen) -> None:
        if len(seen.tokens) >= 3:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        harness.stream(server, streams.Wish("x", 1500, 1.0, 1, (("ignore_eos", True),)).body("tiny"), leave)
    harness.wait_for(lambda: harness.gauge(server, "outlast_engine_kv_blocks_used") == 0, "all blocks are free")


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_the_real_model_survives_kills(builtin_model: Path) -> None:
    with start("builtin", spares=1) as running:
        tally = streams.kill_rounds(
            running, "builtin", kills=3, streams=2, tokens=60, seed=3, between=(1.0, 4.0)
        )  # fmt: skip
        assert tally.differing == []
        assert tally.kills >= 3
