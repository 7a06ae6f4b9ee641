"""The GGUF parser on sound, foreign, truncated and hostile files."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from fixtures.tiny_model import write_gguf, write_tiny_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outlast.engines.native.gguf import F32, Q4_1, Gguf, ModelFileError, UnsupportedModel

SOUND = {"a.text": "wörld", "a.flag": True, "a.count": 7, "a.ratio": 0.5, "a.words": ["x", "", "yz"], "a.ids": [1, -2]}


def _file(path: Path, version: int = 3) -> Path:
    tensors = {"v": (F32, (3,), bytes(12)), "m": (Q4_1, (32, 2), bytes(range(40)))}
    return write_gguf(path, SOUND, tensors, version)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_read(tmp_path: Path, version: int) -> None:
    with Gguf(_file(tmp_path / "a.gguf", version)) as gguf:
        assert gguf.text("a.text") == "wörld"
        assert gguf.integer("a.count") == 7
        assert gguf.number("a.ratio") == 0.5
        assert gguf.metadata["a.flag"] is True
        assert gguf.strings("a.words") == ["x", "", "yz"]
        assert gguf.integers("a.ids") == [1, -2]
        tensor = gguf.tensors["m"]
        assert (tensor.type_name, tensor.shape, tensor.nbytes) == ("Q4_1", (32, 2), 40)
        assert bytes(gguf.data[tensor.offset : tensor.offset + 40]) == bytes(range(40))


def test_missing_and_mistyped_keys_are_named(tmp_path: Path) -> None:
    with Gguf(_file(tmp_path / "a.gguf")) as gguf:
        for read in (gguf.text, gguf.integer, gguf.number, gguf.strings, gguf.integers):
            with pytest.raises(ModelFileError, match=r"nothing\.here is missing"):
                read("nothing.here")
        for read, key in ((gguf.text, "a.count"), (gguf.integer, "a.flag"), (gguf.strings, "a.ids")):
            with pytest.raises(ModelFileError, match=f"{key} is not"):
                read(key)


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "k.gguf", {}, {"blk.0.attn_q.weight": (13, (256, 2), bytes(352))})
    with Gguf(path) as gguf, pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight has type Q5_K"):
        _ = gguf.tensors["blk.0.attn_q.weight"].nbytes


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, len(whole) - 64, 397), len(whole) - 33]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            Gguf(cut)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (8, "<Q", 1 << 63),  # tensors
        (16, "<Q", 1 << 40),  # keys
        (24, "<Q", (1 << 64) - 1),  # length of the first key
        (24, "<Q", 1 << 20),
    ],
)
def test_hostile_counts_cost_no_time(tmp_path: Path, offset: int, form: str, value: int) -> None:
    raw = bytearray(_file(tmp_path / "a.gguf").read_bytes())
    struct.pack_into(form, raw, offset, value)
    (tmp_path / "b.gguf").write_bytes(raw)
    start = time.perf_counter()
    with pytest.raises(ModelFileError):
        Gguf(tmp_path / "b.gguf")
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("element", [0, 8, 9, 12, 99])
def test_hostile_array_lengths_are_bounded(tmp_path: Path, element: int) -> None:
    for count in (1 << 62, 1 << 24, 100):
        raw = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, element, count) + bytes(64)
        (tmp_path / "b.gguf").write_bytes(raw)
        with pytest.raises(ModelFileError):
            Gguf(tmp_path / "b.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = _file(tmp_path_factory.mktemp("fuzz") / "a.gguf")
    return path, path.read_bytes()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6), cut=st.integers(0, 400))
@example(edits=[(4, 9)], cut=0)
def test_damaged_files_give_an_error_or_values_never_a_crash(
    small: tuple[Path, bytes], edits: list[tuple[int, int]], cut: int
) -> None:
    path, sound = small
    raw = bytearray(sound)
    for position, value in edits:
        raw[position % len(raw)] = value
    path.write_bytes(raw[: len(raw) - cut])
    try:
        with Gguf(path) as gguf:
            for key in list(gguf.metadata):
                for read in (gguf.text, gguf.integer, gguf.number, gguf.strings, gguf.integers):
                    try:
                        read(key)
                    except ModelFileError:
                        continue
            for tensor in gguf.tensors.values():
                assert tensor.type not in (0, 3, 8) or tensor.offset + tensor.nbytes <= gguf.size
    except ModelFileError:
        pass


@given(raw=st.binary(max_size=300))
def test_random_bytes_behind_the_magic_never_crash(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(struct.pack("<4sI", b"GGUF", 3) + raw)
    try:
        Gguf(path).close()
    except ModelFileError:
        pass


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match="magic"):
        Gguf(tmp_path / "x")
    with pytest.raises(ModelFileError, match="No such file"):
        Gguf(tmp_path / "absent")
