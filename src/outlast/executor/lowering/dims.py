"""How a reduction walks memory: kept and reduced dimensions, merged where they lie behind each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

#: a kept contiguous dimension shorter than this is not worth an inner loop
MIN_COLUMNS = 4
_FAR = 1 << 62  # a stride of 0 brings no neighbours


@dataclass(frozen=True, slots=True)
class Walk:
    """Sizes and strides in elements, innermost dimension first, at least one dimension each."""

    kept: tuple[tuple[int, int, int], ...]  #: (size, stride in the input, stride in the results)
    reduced: tuple[tuple[int, int], ...]  #: (size, stride in the input)
    columns: bool  #: kept[0] is contiguous and to be walked in the inner loop

    @property
    def count(self) -> int:
        """Number of results."""
        return prod(size for size, _, _ in self.kept)

    @property
    def length(self) -> int:
        """Elements reduced into each result."""
        return prod(size for size, _ in self.reduced)

    def members(self) -> dict[str, Any]:
        """The members of `ol_reduce_args` that describe the walk."""
        return {
            "count": self.count,
            "length": self.length,
            "kept_dims": len(self.kept),
            "reduced_dims": len(self.reduced),
            "columns": int(self.columns),
            "kept_size": [size for size, _, _ in self.kept],
            "kept_in": [stride for _, stride, _ in self.kept],
            "kept_out": [stride for _, _, stride in self.kept],
            "reduced_size": [size for size, _ in self.reduced],
            "reduced_in": [stride for _, stride in self.reduced],
        }


def normal_dims(dims: int | Sequence[int] | None, rank: int, *, empty_is_all: bool = True) -> tuple[int, ...]:
    """Dimensions as sorted non-negative numbers. None (and, for most operators, an empty list) means all of them."""
    if dims is None:
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    if not listed and empty_is_all:
        return tuple(range(rank))
    return tuple(sorted({dim % rank for dim in listed if rank}))


def walk(shape: Sequence[int], stride: Sequence[int], out_stride: Sequence[int], dims: Sequence[int]) -> Walk:
    """The walk of a reduction over `dims` of a tensor; `out_stride` has the strides of the kept dimensions in order."""
    kept_dims = [dim for dim in range(len(shape)) if dim not in dims]
    kept = [(shape[dim], (stride[dim], out)) for dim, out in zip(kept_dims, out_stride, strict=True) if shape[dim] != 1]
    reduced = [(shape[dim], (stride[dim],)) for dim in dims if shape[dim] != 1]
    merged_kept = [(size, steps[0], steps[1]) for size, steps in _merge(kept)] or [(1, 0, 0)]
    merged_reduced = [(size, steps[0]) for size, steps in _merge(reduced)] or [(1, 0)]
    columns = merged_kept[0][1] == 1 and merged_reduced[0][1] != 1 and merged_kept[0][0] >= MIN_COLUMNS
    return Walk(tuple(merged_kept), tuple(merged_reduced), columns)


def _merge(dims: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Innermost first by the first stride; a dimension that continues the one inside it becomes part of it."""
    done: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in sorted(dims, key=lambda dim: [abs(step) or _FAR for step in dim[1]]):
        if done and all(step == done[-1][0] * inner for step, inner in zip(steps, done[-1][1], strict=True)):
            done[-1] = (done[-1][0] * size, done[-1][1])
        else:
            done.append((size, steps))
    return done


def rows_of(shape: Sequence[int], stride: Sequence[int], dim: int) -> tuple[int, int, int] | None:
    """Strides of a tensor seen as [outer, shape[dim], inner], or None if it cannot be seen so without copying."""
    outer = _one_stride(shape[:dim], stride[:dim])
    inner = _one_stride(shape[dim + 1 :], stride[dim + 1 :])
    return None if outer is None or inner is None else (outer, stride[dim], inner)


def _one_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """The stride of dimensions taken as one in row-major order."""
    dims = [(size, step) for size, step in zip(shape, stride, strict=True) if size != 1]
    for (_, step), (size, inside) in itertools.pairwise(dims):
        if step != size * inside:
            return None
    return dims[-1][1] if dims else 0
