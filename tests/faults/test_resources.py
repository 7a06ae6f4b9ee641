"""What runs out: the disk under a durable log, the memory of an engine."""

from __future__ import annotations

import concurrent.futures
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import serve_harness as harness
import streams
import tiny_model

from outlast.serve.settings import Settings
from outlast.serve.subprocess_server import SubprocessServer

pytestmark = pytest.mark.faults

MIB = 1 << 20
#: Room for the control page and two of the log's segments, which are of 1 MiB for the tiny model.
DISK = 2 * MIB + 512 * 1024


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"can not mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def serve(tiny: Path, folder: Path, **more: object) -> SubprocessServer:
    settings = {"durability": "host", "log_dir": str(folder / "log"), "kv_tokens": 4096, **more}
    return SubprocessServer(Settings(model=str(tiny), port=0, **settings))  # type: ignore[arg-type]


#: More tokens at once than two segments hold rows of.
LONG = [streams.Wish(f"wish number {index}", 800, 1.0, index, (("ignore_eos", True),)) for index in range(4)]


def test_a_full_disk_ends_requests_with_an_error_that_names_durability(tiny: Path, small_disk: Path) -> None:
    """Nothing leaves uncommitted: without leave to go lower, the streams end with the reason."""
    with serve(tiny, small_disk) as server:
        with concurrent.futures.ThreadPoolExecutor(len(LONG)) as pool:
            seen = list(pool.map(lambda wish: harness.stream(server, wish.body("tiny")), LONG))
        failed = [s for s in seen if s.errors]
        assert failed
        assert all(s.terminals == 1 and not s.finish for s in failed)
        assert all("durability" in json.dumps(s.errors) for s in failed), [s.errors for s in failed]
        # Once there is room again, the same server serves again.
        subprocess.run(["mount", "-o", f"remount,size={64 * MIB}", str(small_disk)], check=True)
        after = harness.stream(server, LONG[0].body("tiny"))
        assert not after.errors
        assert len(after.tokens) == 800


def test_a_full_disk_degrades_the_durability_where_that_is_allowed(tiny: Path, small_disk: Path) -> None:
    """The streams go on in memory, the server says so, and an engine's death is still survived."""
    with SubprocessServer(Settings(model=str(tiny), port=0, kv_tokens=4096)) as undisturbed:
        expected = streams.run_all(undisturbed, "tiny", LONG)
    with serve(tiny, small_disk, allow_degrade=True) as server:
        assert streams.run_all(server, "tiny", LONG) == expected
        harness.wait_for(lambda: server.health()["durability_degraded"], "a word about it in /health")
        tally = streams.kill_rounds(server, "tiny", kills=3, streams=3, tokens=300, seed=1)
        assert tally.differing == []


def test_a_flushed_log_survives_kills(tiny: Path, tmp_path: Path) -> None:
    with serve(tiny, tmp_path) as server:
        tally = streams.kill_rounds(server, "tiny", kills=4, streams=3, tokens=200, seed=2)
        assert tally.differing == []


def test_an_engine_that_hits_its_memory_limit_is_survived(tiny: Path) -> None:
    asked = [streams.Wish("x" * (200 + index), 400, 1.0, index) for index in range(4)]
    with SubprocessServer(Settings(model=str(tiny), port=0, kv_tokens=8192)) as server:
        expected = streams.run_all(server, "tiny", asked)
        victim = server.engine_pids("active")[0]
        # From here on every new mapping fails; address space is what RLIMIT_AS counts.
        resource.prlimit(victim, resource.RLIMIT_AS, (MIB, resource.RLIM_INFINITY))
        resource.prlimit(victim, resource.RLIMIT_DATA, (0, resource.RLIM_INFINITY))
        big = [streams.Wish("y" * 1500, 20, 0.0, 7) for _ in range(2)]
        got = streams.run_all(server, "tiny", asked + big)
        assert got[:4] == expected
