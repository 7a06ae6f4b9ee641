"""SIGKILL at random moments under 1, 4 and 8 streams: each stream is the one an undisturbed engine would have given."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import serve_harness as harness
import streams
import tiny_model

from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

pytestmark = pytest.mark.faults

NIGHTLY_KILLS = int(os.environ.get("OUTLAST_KILLS", "10000"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def start(model: Path | str, **more: object) -> SubprocessServer:
    """Hang timeout long enough for a busy machine; the test of hangs sets its own."""
    return SubprocessServer(Settings(model=str(model), port=0, **{"hang_timeout": 10.0, **more}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[SubprocessServer]:
    # Two spares: kills come faster than one process starts.
    with start(tiny, spares=2, kv_tokens=16384) as running:
        yield running


def blocks_used(server: SubprocessServer) -> float | None:
    """Blocks of the KV pool in use; None while a new engine has not reported yet."""
    text = harness.request(server, "GET", "/metrics")[1].decode()
    found = re.search(r"^outlast_engine_kv_blocks_used (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found.group(1))


def check(tally: streams.Tally, kills: int) -> None:
    assert tally.differing == []
    assert tally.kills >= kills
    print(f"{tally.kills} kills, {tally.stopped} stops, {tally.streams} streams, {tally.tokens} tokens: all identical")


@pytest.mark.parametrize(("count", "kills", "tokens"), [(1, 40, 500), (4, 80, 400), (8, 60, 300)])
def test_streams_are_identical_under_random_kills(
    server: SubprocessServer, count: int, kills: int, tokens: int
) -> None:
    check(streams.kill_rounds(server, "tiny", kills=kills, streams=count, tokens=tokens, seed=count), kills)


def test_streams_are_identical_when_spares_die_too(server: SubprocessServer) -> None:
    check(streams.kill_rounds(server, "tiny", kills=20, streams=4, tokens=300, seed=99, spares=True), 20)


def test_streams_are_identical_when_engines_hang(tiny: Path) -> None:
    with start(tiny, spares=1, kv_tokens=16384, hang_timeout=1.0) as running:
        # A stopped engine may be killed by the next signal before its silence is noticed: try until one is not.
        for seed in range(5, 13):
            tally = streams.kill_rounds(running, "tiny", kills=4, streams=2, tokens=300, seed=seed, stop_share=0.5)
            check(tally, 4)
            causes = [row["cause"] for row in running.health()["takeovers"]]
            if any("heartbeat" in cause or "hang" in cause or "sign of life" in cause for cause in causes):
                assert tally.stopped > 0
                return
        pytest.fail(f"no takeover for a hang: {causes}")


@pytest.mark.model
def test_the_real_model_survives_kills(builtin_model: Path) -> None:
    with start(builtin_model, spares=1) as running:
        check(streams.kill_rounds(running, builtin_model.stem, kills=3, streams=2, tokens=60, seed=3,
                                  between=(0.5, 1.5)), 3)  # fmt: skip


def test_sixty_four_streams_at_once_survive_a_kill(tiny: Path) -> None:
    with start(tiny, spares=1, kv_tokens=32768) as running:
        tally = streams.kill_rounds(running, "tiny", kills=2, streams=64, tokens=120, seed=64, between=(0.1, 0.5))
        check(tally, 2)
        rss = next(
            int(line.split()[1]) for line in Path(f"/proc/{running.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        )  # fmt: skip
        print(f"supervisor: {rss / 1024:.0f} MB resident")


def test_pool_is_empty_after_disconnects_and_kills(server: SubprocessServer) -> None:
    """Clients that leave, also while a takeover runs, leave nothing behind."""
    for index in range(12):
        connection = harness.connect(server)
        body = streams.Wish("hello there", 1500, 1.0, index).body("tiny")
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        answer.readline()
        if index % 3 == 0:
            for pid in server.engine_pids("active"):
                os.kill(pid, 9)
        connection.close()
    harness.wait_for(lambda: blocks_used(server) == 0, "an empty pool", 20)
    harness.wait_for(lambda: server.health()["live"] == 0, "no live request", 20)


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_many_kills(tiny: Path) -> None:
    """OUTLAST_KILLS (10,000) kills over 1, 4 and 8 streams, spares included."""
    done = differing = 0
    started = time.monotonic()
    with start(tiny, spares=3, kv_tokens=16384) as running:
        assert threading.active_count() < 10
        seed = 1000
        while done < NIGHTLY_KILLS:
            for count, tokens in ((1, 500), (4, 400), (8, 300)):
                seed += 1
                tally = streams.kill_rounds(
                    running, "tiny", kills=min(100, NIGHTLY_KILLS - done), streams=count, tokens=tokens, seed=seed,
                    spares=seed % 2 == 0, between=(0.01, 0.25),
                )  # fmt: skip
                done += tally.kills
                differing += len(tally.differing)
                assert tally.differing == []
                print(f"{done} kills in {time.monotonic() - started:.0f} s, {differing} differing", flush=True)
                if done >= NIGHTLY_KILLS:
                    break
