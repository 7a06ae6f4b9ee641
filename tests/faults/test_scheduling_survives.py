"""Kills of an engine whose requests share blocks, yield to one another and come back: tokens stay as undisturbed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model

from outlast.core import _native as core
from outlast.core.log import LogOwner
from outlast.core.memory import Memory
from outlast.engines.native.engine import NativeEngine
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.protocol import EngineRequest, JournalEntry, SamplingParams

pytestmark = pytest.mark.faults

BLOCK = 16
Seen = dict[int, list[Any]]


def requests() -> list[EngineRequest]:
    """Two families of prompts that begin alike, greedy and sampled; together three times what the pool holds."""
    out = []
    for key in range(1, 9):
        stem = list(range(3, 90)) if key % 2 else list(range(200, 150, -1))
        params = SamplingParams(
            temperature=key % 3 / 2, seed=key, presence_penalty=0.4 * (key % 2), top_logprobs=1,
            logit_bias=((20, 8.0), (21, 8.0)) if key > 5 else (),
        )  # fmt: skip
        out.append(EngineRequest(key, (*stem, key, key + 1), 30 + 4 * key, params=params))
    return out


class Lives:
    """Forked engines over one log, one after the other."""

    def __init__(self, model: Path, owner: LogOwner | None, blocks: int, speculate: int = 0) -> None:
        self.model = model
        self.owner = owner
        self.blocks = blocks
        self.speculate = speculate
        self.seen: Seen = {}
        self.deaths = 0
        self.stats: dict[str, float] = {}
        self.reports: list[dict[str, Any]] = []

    def live(self, point: str = "", countdown: int = 1) -> bool:
        """One engine, to the end of its work (True) or to its death at a kill point."""
        epoch = self.owner.fence() if self.owner else 1
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._work(epoch, write, point, countdown)
            except BaseException:  # noqa: BLE001  the child has nobody to raise to
                import traceback

                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                if line.endswith("\n"):
                    self._take(json.loads(line))
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self.deaths += 1
            return False
        assert status == 0
        return True

    def _work(self, epoch: int, out: int, point: str, countdown: int) -> None:
        weights = open_weights(Memory.anonymous(weights_bytes(self.model)), self.model)
        engine = NativeEngine(
            weights, log=dict(self.owner.spec()) if self.owner else None, kv_tokens=self.blocks * BLOCK,
            block_tokens=BLOCK, specialise=False, prefill_chunk=24, speculate=self.speculate,
        )  # fmt: skip
        if point:
            core.arm_kill_point(point, countdown)
        wishes = requests()
        delivered = {key: tuple(row[0] for row in rows) for key, rows in self.seen.items()}
        entries = [JournalEntry(r, delivered.get(r.key, ())) for r in wishes] if self.deaths else []
        report = engine.recover(epoch, [e for e in entries if not finished(e)])
        os.write(out, (json.dumps({"report": [report.restored, report.recomputed, report.reason]}) + "\n").encode())
        if not self.deaths:
            for r in wishes:
                engine.submit(r)
        while engine.busy():
            tokens = [(e.key, e.index, (e.token, e.logprob, e.top)) for e in engine.step()]
            assert engine.failures() == []
            os.write(out, (json.dumps({"tokens": tokens}) + "\n").encode())
        os.write(out, (json.dumps({"stats": engine.stats()}) + "\n").encode())

    def _take(self, row: dict[str, Any]) -> None:
        for key, index, value in row.get("tokens", ()):
            rows = self.seen.setdefault(key, [])
            assert index == len(rows), f"request {key}: token {index} came, {len(rows)} were known"
            rows.append(value)
        self.stats = row.get("stats", self.stats)
        if "report" in row:
            self.reports.append(row["report"])


def finished(entry: JournalEntry) -> bool:
    return len(entry.delivered) == entry.request.max_tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> Seen:
    lives = Lives(tiny, None, 200)
    assert lives.live()
    assert lives.stats["preemptions"] == 0
    return lives.seen


@pytest.fixture
def owner() -> Iterator[LogOwner]:
    owner = LogOwner.in_memory(24 << 20, segment_bytes=1 << 20)
    yield owner
    owner.close()


@pytest.mark.parametrize("seed", range(6))
def test_sharing_and_yielding_requests_survive_kills(tiny: Path, undisturbed: Seen, owner: LogOwner, seed: int) -> None:
    rng = random.Random(seed)
    lives = Lives(tiny, owner, 26, speculate=5 * (seed % 2))
    points = ["begin", "append.payload", "append.header", "commit", "commit.payload", "commit.header"]
    points += ["recover.scanned", "recover.applied"]
    while lives.deaths < 12:
        point = rng.choice(points)
        if lives.live(point, 1 if point.startswith("recover") else rng.randrange(1, 50)):
            break
    else:
        assert lives.live()
    assert lives.seen == undisturbed
    assert lives.deaths > 0
    assert sum(report[0] for report in lives.reports) > 3, "little came back from the log"


def test_requests_that_yielded_are_restored_after_a_kill(tiny: Path, undisturbed: Seen, owner: LogOwner) -> None:
    """All that had rows are counted as restored, also those that waited in the log when the engine died."""
    lives = Lives(tiny, owner, 16)
    assert not lives.live("commit.header", 80)
    begun = sum(0 < len(lives.seen.get(r.key, ())) < r.max_tokens for r in requests())
    assert lives.live()
    assert lives.reports[1][0] >= begun > 1
    assert lives.seen == undisturbed
    assert lives.stats["preemptions"] > 0


def test_a_small_log_is_emptied_around_requests_that_yielded(tiny: Path, undisturbed: Seen) -> None:
    """Rows that only the log holds move with it when its old segments are released."""
    owner = LogOwner.in_memory(10 << 19, segment_bytes=1 << 19)
    lives = Lives(tiny, owner, 16)
    while not lives.live("commit.header", 40):
        pass
    assert lives.deaths > 2
    assert lives.seen == undisturbed
    owner.close()
