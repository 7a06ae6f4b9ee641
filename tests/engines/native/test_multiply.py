"""Each tensor type and way to compute: a repacked matrix times tokens, against numpy and across instruction sets."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from fixtures.tiny_model import TYPES, quantize, write_gguf

from outlast.engines.native import _native
from outlast.engines.native.decoder import Compute
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.reference import dequantize, multiply_quantized, quantize_activations, unpack

ROWS, COLUMNS, TOKENS = 37, 768, 21  # a partial group; three super-blocks; tiles of 8, 4 and 1 tokens
NAME = "m"
QUANTIZED = [kind for kind in TYPES if kind.startswith("Q")]
MODES = get_args(Compute)


@dataclasses.dataclass
class Product:
    gguf: Gguf
    packed: mmap.mmap
    kind: int
    columns: int
    x: np.ndarray

    def native(self, compute: str, isa: str = "", tokens: slice = slice(None)) -> np.ndarray:
        x = np.ascontiguousarray(self.x[tokens])
        raw = _native.multiply(self.packed, 0, self.kind, ROWS, self.columns, x.tobytes(), compute, isa)
        return np.frombuffer(raw, np.float32).reshape(len(x), ROWS)


def product(path: Path, kind: str, columns: int = COLUMNS) -> Product:
    random = np.random.default_rng(3)
    values = random.standard_normal((ROWS, columns)).astype(np.float32)
    number = TYPES[kind]
    gguf = Gguf(write_gguf(path / "m.gguf", {}, {NAME: (number, (columns, ROWS), quantize(values, number))}))
    packed = mmap.mmap(-1, _native.matrix_bytes(number, ROWS, columns))
    _native.repack(gguf.data, gguf.tensors[NAME].offset, number, ROWS, columns, packed, 0)
    x = random.standard_normal((TOKENS, columns)).astype(np.float32)
    x[1] *= 1e4 * random.standard_normal(columns)  # large differences within a block
    x[2, :64] = 0
    x[3] = 1e-35
    return Product(gguf, packed, number, columns, x)


@pytest.fixture(params=list(TYPES))
def any_product(request: pytest.FixtureRequest, tmp_path: Path) -> Product:
    return product(tmp_path, request.param)


def test_dequantized_weights_are_those_of_the_gguf_package(any_product: Product) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    tensor = any_product.gguf.tensors[NAME]
    raw = np.frombuffer(any_product.gguf.data[tensor.offset : tensor.offset + tensor.nbytes], np.uint8)
    theirs = quants.dequantize(raw.reshape(ROWS, -1), constants.GGMLQuantizationType(any_product.kind))
    ours = dequantize(any_product.gguf, NAME)
    assert np.allclose(ours, theirs.reshape(ROWS, -1), rtol=1e-6, atol=1e-7)  # theirs may round in another order


def test_repacked_rows_are_the_dequantized_ones(any_product: Product) -> None:
    expected = dequantize(any_product.gguf, NAME)
    for row in range(ROWS):
        got = _native.read_row(any_product.packed, 0, any_product.kind, ROWS, COLUMNS, row)
        assert np.array_equal(np.array(got, np.float32), expected[row])


def _bound(p: Product) -> np.ndarray:
    """Rounding of float32 sums: 2^-24 for each of so many additions, of the sum of the products' sizes."""
    sizes = np.abs(p.x.astype(np.float64)) @ np.abs(dequantize(p.gguf, NAME).astype(np.float64)).T
    if p.gguf.tensors[NAME].type_name in ("Q4_1", "Q4_K"):  # scale * q and least cancel
        u = unpack(p.gguf, NAME)
        parts = (np.abs(u.scale * u.q) + np.abs(u.least)).reshape(ROWS, -1).astype(np.float64)
        sizes = np.abs(p.x.astype(np.float64)) @ parts.T
    return sizes * 2.0**-24 * 32 + 1e-30


@pytest.mark.parametrize("isa", _native.isas())
def test_float_products_agree_with_numpy(any_product: Product, isa: str) -> None:
    exact = any_product.x.astype(np.float64) @ dequantize(any_product.gguf, NAME).astype(np.float64).T
    modes = ("f32",) if any_product.gguf.tensors[NAME].type_name.startswith("Q") else MODES
    for compute in modes:
        assert (np.abs(any_product.native(compute, isa) - exact) <= _bound(any_product)).all()


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kind", QUANTIZED)
def test_integer_products_agree_with_numpy(tmp_path: Path, kind: str, isa: str) -> None:
    """To the rounding of floats, against the same quantized activations."""
    p = product(tmp_path, kind)
    for planes, compute in ((1, "int8"), (2, "int8x2")):
        expected = multiply_quantized(p.gguf, NAME, p.x, planes)
        # An activation whose quotient lies on a tie may be rounded to its other neighbour: allow half a dozen of these.
        scale, _ = quantize_activations(p.x, planes)
        tie = 6 * scale.max((1, 2))[:, None] * np.abs(dequantize(p.gguf, NAME)).max() if compute == "int8x2" else 0
        assert (np.abs(p.native(compute, isa) - expected) <= _bound(p) + tie).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_two_planes_are_closer_by_two_orders_than_one(tmp_path: Path, kind: str) -> None:
    p = product(tmp_path, kind)
    exact = p.x.astype(np.float64) @ dequantize(p.gguf, NAME).astype(np.float64).T
    one, two = (np.abs(p.native(mode) - exact)[4:].mean() for mode in ("int8", "int8x2"))
    assert 1e-5 < two / one < 1e-2


@pytest.mark.parametrize("compute", MODES)
def test_vector_units_with_fused_operations_give_equal_bits(any_product: Product, compute: str) -> None:
    fused = [isa for isa in _native.isas() if isa != "generic"]
    if not fused:
        pytest.skip("only the portable build runs here")
    results = {any_product.native(compute, isa).tobytes() for isa in fused}
    assert len(results) == 1


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("compute", MODES)
def test_a_token_does_not_see_its_neighbours(any_product: Product, compute: str, isa: str) -> None:
    together = any_product.native(compute, isa)
    for tokens in (slice(0, 1), slice(5, 7), slice(3, 7), slice(2, 13), slice(20, 21)):
        assert any_product.native(compute, isa, tokens).tobytes() == together[tokens].tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("compute", MODES)
def test_an_odd_number_of_blocks_is_right(tmp_path: Path, kind: str, compute: str) -> None:
    p = product(tmp_path, kind, columns=96)
    exact = p.x.astype(np.float64) @ dequantize(p.gguf, NAME).astype(np.float64).T
    bound = {"f32": 1e-6, "int8x2": 1e-3, "int8": 0.1}[compute] * np.abs(p.x).max(1, keepdims=True) * 30
    for isa in _native.isas():
        assert (np.abs(p.native(compute, isa) - exact) <= bound + 1e-30).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compute", MODES)
def test_what_is_not_finite_stays_so(any_product: Product, compute: str, bad: float) -> None:
    for column in (0, 17, COLUMNS - 1):
        any_product.x[4, column] = bad
        for isa in _native.isas():
            y = any_product.native(compute, isa)
            assert not np.isfinite(y[4]).any()
            assert np.isfinite(y[5:]).all()
