"""Repacked weights: the same numbers in another order, never used half-written."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from fixtures.tiny_model import TinyShape, tiny_vocabulary, write_gguf, write_tiny_model

from outlast.core.errors import CorruptState, UsageError
from outlast.engines.native import _native, weights
from outlast.engines.native.gguf import Gguf, UnsupportedModel
from outlast.engines.native.reference import dequantize

ODD = TinyShape(layers=1, hidden=96, heads=3, kv_heads=3, head_dim=32, ffn=96)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_rows_hold_the_files_own_numbers(tmp_path: Path, kind: str) -> None:
    gguf = Gguf(write_tiny_model(tmp_path / "m.gguf", kind, shape=ODD))
    plan = weights.plan(gguf)
    packed = weights.repack(gguf, plan, bytearray(plan.size))
    for t in packed.tensors:
        expected = dequantize(gguf, t.name)
        if t.rows == 0:
            assert bytes(packed.buffer[t.offset : t.offset + 4 * t.columns]) == expected.tobytes()
            continue
        for row in {0, 1, 15, 16, t.rows - 2, t.rows - 1}:
            got = _native.read_row(packed.buffer, t.offset, t.type, t.rows, t.columns, row)
            assert np.array_equal(np.array(got, np.float32), expected[row])
    vocabulary = len(tiny_vocabulary()[0])
    assert vocabulary % 16, "the last group of rows must be a partial one for this test to mean something"


def test_another_mapping_of_the_memory_needs_no_model_file(tiny_gguf: Path) -> None:
    gguf = Gguf(tiny_gguf)
    plan = weights.plan(gguf)
    memory = os.memfd_create("weights")
    os.ftruncate(memory, plan.size)
    written = weights.repack(gguf, plan, mmap.mmap(memory, plan.size))
    mapped = weights.Weights.open(mmap.mmap(memory, plan.size, prot=mmap.PROT_READ))
    os.close(memory)
    assert mapped.digest == written.digest == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    assert (mapped.config, mapped.tensors) == (written.config, written.tensors)
    assert bytes(mapped.buffer) == bytes(written.buffer)


def test_a_half_written_buffer_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = Gguf(tiny_gguf)
    plan = weights.plan(gguf)
    buffer = bytearray(plan.size)
    with pytest.raises(CorruptState, match="no header"):
        weights.Weights.open(buffer)
    weights.repack(gguf, plan, buffer)
    monkeypatch.setattr(gguf, "digest", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        weights.repack(gguf, plan, buffer)  # again over a buffer that was ready, interrupted near the end
    with pytest.raises(CorruptState, match="not ready"):
        weights.Weights.open(buffer)


@pytest.mark.parametrize(
    ("offset", "what"), [(0, "header"), (16, "layout"), (20, "damaged|shorter"), (24, "shorter"), (80, "damaged")]
)
def test_a_damaged_header_is_refused(tiny_gguf: Path, offset: int, what: str) -> None:
    gguf = Gguf(tiny_gguf)
    plan = weights.plan(gguf)
    buffer = bytearray(plan.size)
    weights.repack(gguf, plan, buffer)
    buffer[offset] ^= 0x40
    buffer[offset + 3] ^= 0x40
    with pytest.raises(CorruptState, match=what):
        weights.Weights.open(buffer)


def test_a_buffer_that_is_too_small_is_refused(tiny_gguf: Path) -> None:
    gguf = Gguf(tiny_gguf)
    plan = weights.plan(gguf)
    with pytest.raises(UsageError, match="the buffer has"):
        weights.repack(gguf, plan, bytearray(plan.size - 1))


def _changed(path: Path, source: Path, metadata: dict[str, object], rename: dict[str, str]) -> Gguf:
    with Gguf(source) as gguf:
        values = {k: v for k, v in gguf.metadata.items() if isinstance(v, str | int | float)} | metadata
        tensors = {
            rename.get(t.name, t.name): (t.type, t.shape, bytes(gguf.data[t.offset : t.offset + t.nbytes]))
            for t in gguf.tensors.values()
        }
    return Gguf(write_gguf(path, values, tensors))


@pytest.mark.parametrize(
    ("metadata", "rename", "what"),
    [
        ({"general.architecture": "gemma2"}, {}, "gemma2"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
        ({"llama.attention.head_count": [4, 2]}, {}, "head_count"),
        ({"llama.rope.dimension_count": 8}, {}, "dimension_count"),
        ({"llama.block_count": 3}, {}, "blk.2"),
        ({"llama.embedding_length": 32}, {}, "shape"),
        ({}, {"blk.0.attn_q.weight": "blk.0.attn_q.bias"}, "attn_q.bias"),
        ({}, {"blk.0.attn_norm.weight": "blk.0.attn_output.bias"}, "attn_output.bias"),
        ({}, {"output_norm.weight": "blk.1.ffn_norm.weight2"}, "ffn_norm.weight2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, tiny_gguf: Path, metadata: dict[str, object], rename: dict[str, str], what: str
) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        weights.plan(_changed(tmp_path / "x.gguf", tiny_gguf, metadata, rename))
