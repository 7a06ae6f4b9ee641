"""Processes over one log, each continuing where the last one died, and what they reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engine_driver
from fork_server import ForkServer

from outlast.core.log import LogOwner
from outlast.engines.native.sequences import encode_request
from outlast.engines.protocol import EngineRequest, SamplingParams

STOP_AT = 30


def requests() -> list[EngineRequest]:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=11, top_logprobs=2),
        SamplingParams(temperature=0.9, seed=5, top_p=0.8, presence_penalty=0.7, frequency_penalty=0.2),
    ]
    return [EngineRequest(key + 1, tuple(range(3 + key, 40 + 30 * key)), 200, params=p) for key, p in enumerate(params)]


class Run:
    """One or more processes that continue one another over one log, and what they reported."""

    def __init__(self, model: Path, owner: LogOwner | None, server: ForkServer | None = None) -> None:
        """`server`: runs are children of it, with the transformers engine; None = processes with the native one."""
        self.model = model
        self.server = server
        self.owner = owner
        self.seen: dict[int, list[tuple[Any, ...]]] = {}
        self.repeated = 0
        self.last: dict[str, Any] = {}
        self.deaths = 0
        self.died_of = 0

    def go(self, **orders: Any) -> bool:
        """Run a process to its end; True if it finished, False if it died by a signal."""
        wishes = requests()
        order = engine_driver.Orders(
            model=str(self.model),
            log=dict(self.owner.spec()) if self.owner else None,
            writer_epoch=self.owner.fence() if self.owner else 1,
            requests=[encode_request(r).decode() for r in wishes],
            delivered={key: [row[0] for row in rows] for key, rows in self.seen.items()} if self.deaths else {},
            stop_at=STOP_AT,
            engine="native" if self.server is None else "transformers",
            **orders,
        )
        fds = self.owner.fds() if self.owner else ()
        if self.server is not None:
            return self._take_all(*self.server.run(asdict(order), fds), "see above")
        done = subprocess.run(
            [sys.executable, str(Path(engine_driver.__file__))],
            input=json.dumps(asdict(order)),
            capture_output=True,
            text=True,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=120,
        )
        return self._take_all(done.returncode, done.stdout, done.stderr)

    def _take_all(self, status: int, output: str, errors: str) -> bool:
        """Everything that a run printed; as `go`."""
        for line in output.splitlines():
            if not line.endswith("}"):
                continue  # it died in the middle of a line
            row = json.loads(line)
            for key, index, token, logprob, top in row.get("tokens", ()):
                self.take(key, index, (token, logprob, tuple(map(tuple, top))))
            if "kv" in row:
                self.last = row
        if status in (-signal.SIGKILL, -signal.SIGSEGV):
            self.died_of = -status
            self.deaths += 1
            for r in requests():
                self.seen.setdefault(r.key, [])
            return False
        assert status == 0, errors
        return True

    def take(self, key: int, index: int, value: tuple[Any, ...]) -> None:
        rows = self.seen.setdefault(key, [])
        assert index <= len(rows), f"request {key}: token {index} came, {len(rows)} were known"
        if index < len(rows):
            assert rows[index] == value, "a repeated token differs"
            self.repeated += 1
        else:
            rows.append(value)


def compare(run: Run, undisturbed: Mapping[str, Any]) -> None:
    for key, rows in undisturbed["seen"].items():
        got = run.seen[key]
        shared = min(len(got), len(rows))
        assert shared >= STOP_AT
        assert got[:shared] == rows[:shared]
    # All requests step together, so the same number of steps gives the same number of rows where no request lagged.
    for key, count in undisturbed["computed"].items():
        if run.last["computed"][key] == count:
            assert run.last["kv"][key] == undisturbed["kv"][key], f"KV bytes of request {key} differ"
