"""A damaged, foreign or lost log never reaches a client: doubtful state is computed again, with the same tokens."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import log_damage
import pytest
import tiny_model
from engine_runs import Run, compare

from outlast.core.log import CONTROL_BYTES, KV_ROWS, KV_SEAL, Log, LogOwner
from outlast.core.memory import Memory

pytestmark = pytest.mark.faults

SEGMENT = 1 << 19


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> Mapping[str, Any]:
    run = Run(tiny, None)
    assert run.go()
    return {"seen": run.seen, "kv": run.last["kv"], "computed": run.last["computed"]}


def interrupted(tiny: Path, owner: LogOwner) -> Run:
    run = Run(tiny, owner)
    assert not run.go(kill_point="commit.header", countdown=20)
    return run


def flip(owner: LogOwner, offset: int, bit: int) -> None:
    with Memory.from_fd(os.dup(owner.fds()[0])) as memory:
        memory.buffer[offset] ^= 1 << bit


def used_offsets(owner: LogOwner) -> range:
    """Offsets in the log's memory that hold records."""
    report = Log.open(owner.spec(), None).report
    return range(CONTROL_BYTES, CONTROL_BYTES + report["segments"][-1]["used"])


@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_anywhere_changes_no_token(tiny: Path, undisturbed: Mapping[str, Any], seed: int) -> None:
    owner = LogOwner.in_memory(4 * SEGMENT, segment_bytes=SEGMENT)
    run = interrupted(tiny, owner)
    rng = random.Random(seed)
    flip(owner, rng.choice(used_offsets(owner)), rng.randrange(8))
    assert run.go()
    compare(run, undisturbed)


def test_rows_damaged_under_a_valid_checksum_are_found(tiny: Path, undisturbed: Mapping[str, Any]) -> None:
    """Wrong bytes that the log's CRC does not see (a fault between gather and hash): digest or recomputation does."""
    for kind in (KV_ROWS, KV_SEAL):
        owner = LogOwner.in_memory(4 * SEGMENT, segment_bytes=SEGMENT)
        run = interrupted(tiny, owner)
        log = Log.open(owner.spec(), None)
        record = next(r for r in log.records() if r.type == kind)
        header = (ctypes.c_uint8 * 64).from_address(record.address - 64)
        (ctypes.c_uint8 * record.length).from_address(record.address)[5] ^= 16
        log_damage.reseal(header, record.address, record.length)
        log_damage.recommit(log, record.epoch)
        assert Log.open(owner.spec(), None).report["stop"] == ""
        assert run.go()
        compare(run, undisturbed)
        assert run.last["report"]["recomputed"] + run.last["report"]["restored"] == 3
        if kind == KV_SEAL:
            assert run.last["report"]["recomputed"] == 1


def test_a_log_of_another_model_is_not_read(tiny: Path, tmp_path: Path, undisturbed: Mapping[str, Any]) -> None:
    owner = LogOwner.in_directory(tmp_path / "log", 4 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    other = tiny_model.write_tiny_model(tmp_path / "other.gguf", seed=2)
    first = interrupted(other, owner)
    assert first.deaths == 1
    run = Run(tiny, owner)
    run.deaths = 1
    run.seen = {key: [] for key in first.seen}
    assert run.go()
    compare(run, undisturbed)
    assert "manifest field model" in run.last["report"]["reason"]
    assert run.last["report"]["restored"] == 0


def test_a_log_of_another_block_size_is_not_read(tiny: Path, tmp_path: Path, undisturbed: Mapping[str, Any]) -> None:
    owner = LogOwner.in_directory(tmp_path / "log", 4 * SEGMENT, segment_bytes=SEGMENT, durable=False)
    run = interrupted(tiny, owner)
    assert run.go(block_tokens=32)
    compare(run, undisturbed)
    assert "manifest field block_tokens is 16 in the log and 32 here" in run.last["report"]["reason"]


def test_a_lost_log_costs_time_only(tiny: Path, undisturbed: Mapping[str, Any]) -> None:
    """The log is behind what clients were given (its last epochs are gone): what was delivered counts."""
    owner = LogOwner.in_memory(4 * SEGMENT, segment_bytes=SEGMENT)
    run = interrupted(tiny, owner)
    run.owner = LogOwner.in_memory(4 * SEGMENT, segment_bytes=SEGMENT)  # an empty one
    assert run.go()
    compare(run, undisturbed)
    assert run.last["report"]["recomputed"] == 3


def test_several_lengths_around_every_boundary(tiny: Path, undisturbed: Mapping[str, Any]) -> None:
    """Deaths after each step: restored contexts end before, at and behind the ends of blocks and segments."""
    for countdown in range(6, 40, 3):
        run = Run(tiny, LogOwner.in_memory(24 << 16, segment_bytes=1 << 16))
        died = not run.go(kill_point="commit.header", countdown=countdown)
        assert run.go() if died else True
        compare(run, undisturbed)
