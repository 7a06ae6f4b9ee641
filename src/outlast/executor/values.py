"""Tensors while a plan is made: what eager gave (`Meta`), where a plan keeps it (`Buffer`), views of that (`Value`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outlast.core.errors import OutlastError
from outlast.executor.kernels import DTYPES

MAX_DIMS = 8  #: OL_MAX_DIMS


class Unsupported(OutlastError):
    """A call that the executor leaves to PyTorch; the text says why."""


def itemsize_of(dtype: str) -> int:
    """Bytes of an element; also for types that only PyTorch works on, which are named as torch does."""
    known = DTYPES.get(dtype)
    if known is not None:
        return known[2]
    import torch

    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as PyTorch gives a fresh tensor (a dimension of size 0 counts as 1)."""
    strides, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape of a result as eager PyTorch made it."""

    dtype: str  #: a key of `outlast.executor.kernels.DTYPES`
    shape: tuple[int, ...]
    stride: tuple[int, ...]  #: elements
    offset: int = 0  #: elements from the start of its storage

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize_of(self.dtype)


@dataclass(slots=True, eq=False)
class Buffer:
    """A piece of memory of a plan. Its address is known when the plan is called, and patched into the steps."""

    kind: str  #: "input", "constant" (a tensor that the function closes over), "literal", "temporary" or "external"
    index: int = 0  #: of the input or constant
    size: int = 0  #: bytes, for literals and temporaries
    data: bytes = b""  #: of a literal
    made_by: Any = None  #: the external call that makes it, for "external"
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Value:
    """A strided view of a buffer."""

    buffer: Buffer
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  #: elements
    offset: int = 0  #: bytes from the buffer's address to element [0, 0, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize_of(self.dtype)

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; strides of dimensions of size 1 do not matter."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 0:
                return True
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def is_dense(self) -> bool:
        """Every element has a place of its own, without gaps, in some order of the dimensions."""
        step = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 0:
                return True
            if size == 1:
                continue
            if stride != step:
                return False
            step *= size
        return True

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte (exclusive) that it may touch, from the buffer's address."""
        if self.numel == 0:
            return self.offset, self.offset
        low = sum(min(0, (n - 1) * s) for n, s in zip(self.shape, self.stride, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + low * self.itemsize, self.offset + (high + 1) * self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two indices may share an element: certain for stride 0, and never missed."""
        step = 0
        for stride, size in sorted((abs(s), n) for s, n in zip(self.stride, self.shape, strict=True) if n > 1):
            if stride <= step:
                return True
            step += stride * (size - 1)
        return False

    def meta(self) -> Meta:
        """Its shape, without the place."""
        return Meta(self.dtype, self.shape, self.stride)

    def same_place(self, other: Value) -> bool:
        """Whether both name exactly the same elements in the same order."""
        return (self.buffer, self.offset, self.dtype, self.shape, self.stride) == (
            other.buffer, other.offset, other.dtype, other.shape, other.stride
        )  # fmt: skip

    def may_overlap(self, other: Value) -> bool:
        """Whether both may touch one byte; judged by their spans."""
        if self.buffer is not other.buffer:
            return False
        (a, b), (c, d) = self.span, other.span
        return a < d and c < b

    def _at(self, elements: int) -> int:
        return self.offset + elements * self.itemsize

    def expand(self, shape: Sequence[int]) -> Value:
        """Broadcast to `shape`; raises ValueError if that is not possible."""
        lead = len(shape) - len(self.shape)
        if lead < 0:
            raise ValueError(f"cannot expand {self.shape} to {tuple(shape)}")
        stride = [0] * lead
        for have, want, step in zip(self.shape, shape[lead:], self.stride, strict=True):
            if have != want and have != 1:
                raise ValueError(f"cannot expand {self.shape} to {tuple(shape)}")
            stride.append(step if have == want else 0)
        return replace(self, shape=tuple(shape), stride=tuple(stride))

    def permute(self, dims: Sequence[int]) -> Value:
        """Dimensions in another order."""
        dims = [d % len(self.shape) for d in dims]
        return replace(self, shape=tuple(self.shape[d] for d in dims), stride=tuple(self.stride[d] for d in dims))

    def select(self, dim: int, index: int) -> Value:
        """Without dimension `dim`, at `index` of it (negative ones count from the end)."""
        dim %= len(self.shape)
        index = index + self.shape[dim] if index < 0 else index
        if not 0 <= index < self.shape[dim]:
            raise IndexError(f"index {index} in a dimension of size {self.shape[dim]}")
        return replace(
            self,
            shape=self.shape[:dim] + self.shape[dim + 1 :],
            stride=self.stride[:dim] + self.stride[dim + 1 :],
            offset=self._at(index * self.stride[dim]),
        )

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> Value:
        """`length` indices of dimension `dim` from `start` on, every `step`-th."""
        dim %= len(self.shape)
        return replace(
            self,
            shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]),
            stride=(*self.stride[:dim], self.stride[dim] * step, *self.stride[dim + 1 :]),
            offset=self._at(start * self.stride[dim]),
        )

    def unsqueeze(self, dim: int) -> Value:
        """With a dimension of size 1 before `dim`."""
        dim = dim + len(self.shape) + 1 if dim < 0 else dim
        stride = self.shape[dim] * self.stride[dim] if dim < len(self.shape) else 1
        return replace(
            self,
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            stride=(*self.stride[:dim], stride, *self.stride[dim:]),
        )

    def view(self, shape: Sequence[int]) -> Value:
        """The same elements in row-major order in another shape, without copying; raises ValueError if impossible."""
        shape = tuple(shape)
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {shape}")
        if self.numel == 0 or self.is_contiguous:
            return replace(self, shape=shape, stride=contiguous_strides(shape))
        old = [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n != 1]
        stride = [0] * len(shape)
        at = len(shape) - 1
        while old:
            n, s = old.pop()
            while old and old[-1][1] == n * s:  # dimensions that lie behind each other act as one
                n *= old.pop()[0]
            while at >= 0 and (shape[at] == 1 or (n > 1 and n % shape[at] == 0)):
                stride[at] = s
                s *= shape[at]
                n //= shape[at]
                at -= 1
            if n != 1:
                raise ValueError(f"cannot view {self.shape} with strides {self.stride} as {shape} without copying")
        while at >= 0:
            stride[at] = stride[at + 1] * shape[at + 1] if at + 1 < len(shape) else 1
            at -= 1
        return replace(self, shape=shape, stride=tuple(stride))
