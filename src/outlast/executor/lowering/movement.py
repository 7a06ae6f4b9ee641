"""Lowerings of the family movement: concatenation, padding, tiling, rows picked by an index, triangles.

Most are copies between views, which the planner makes into pointwise steps; `mosaic` lays an output out from such
pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from outlast.executor.lowering import Meta, Planner, Unsupported, Value, lowers
from outlast.executor.lowering.views import cloned, filled, flipped, reshaped

CAT_PIECES = 8  #: OL_CAT_PIECES
MOSAIC_PIECES_MAX = 32  #: above it one call of PyTorch costs less than that many steps
#: more rows than this, each of fewer bytes than that, are copied element by element and not row by row
NARROW_ROWS, NARROW_BYTES = 64, 16
BYTES_PER_SHARE = 1 << 17  #: a part below it is copied sooner than another thread is woken

#: (start in the output, length, start in the input, step in the input) along one dimension
Segment = tuple[int, int, int, int]


def row_pitch(value: Value, dim: int) -> int | None:
    """Elements between "rows", which are the dimensions from `dim` on; None if rows have gaps or no common pitch."""
    step = 1
    for size, stride in zip(reversed(value.shape[dim:]), reversed(value.stride[dim:]), strict=True):
        if size != 1 and stride != step:
            return None
        step *= size
    pitch, covered = 0, 1
    for size, stride in zip(reversed(value.shape[:dim]), reversed(value.stride[:dim]), strict=True):
        if size == 1:
            continue
        if covered == 1:
            pitch = stride
        elif stride != pitch * covered:
            return None
        covered *= size
    return pitch


def shares_of(elements: int, itemsize: int) -> int:
    """Into how many parts a copy of that many elements is worth splitting."""
    return max(1, elements * itemsize // BYTES_PER_SHARE)


def mosaic(p: Planner, to: Value, x: Value, segments: Sequence[Sequence[Segment]]) -> None:
    """Copy the pieces of `x` that are products of one segment per dimension to their places in `to`."""
    if math.prod(len(one) for one in segments) > MOSAIC_PIECES_MAX:
        raise Unsupported("so many pieces that one call of PyTorch is faster")
    for choice in itertools.product(*segments):
        target, source = to, x
        for dim, (at, length, start, step) in enumerate(choice):
            target, source = target.narrow(dim, at, length), source.narrow(dim, start, length, step)
        p.copy(target, source)


@lowers("aten::cat")
def cat(p: Planner, out: Meta, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Tensors of shape [0] are passed over whatever the others' rank, as PyTorch has always done."""
    to = p.like(out)
    if out.numel == 0:
        return to
    kept = [x for x in tensors if x.numel != 0]
    join(p, to, kept, dim % len(out.shape))
    return to


@lowers("aten::stack")
def stack(p: Planner, out: Meta, tensors: Sequence[Value], dim: int = 0) -> Value:
    """As `cat`, along a new dimension."""
    to = p.like(out)
    dim %= len(out.shape)
    if out.numel != 0:
        join(p, to, [x.unsqueeze(dim) for x in tensors], dim)
    return to


def join(p: Planner, to: Value, tensors: Sequence[Value], dim: int) -> None:
    """Write tensors one after the other along `dim`: by one step where all are rows of bytes, else piece by piece."""
    pending: list[Value] = []
    first = at = 0

    def flush() -> None:
        if pending:
            join_rows(p, to.narrow(dim, first, at - first), pending, dim)
            pending.clear()

    for x in tensors:
        size = x.shape[dim]
        rows, width = math.prod(to.shape[:dim]), math.prod(x.shape[dim:]) * x.itemsize
        narrow = rows > NARROW_ROWS and width < NARROW_BYTES
        if x.dtype == to.dtype and to.is_contiguous and not narrow and row_pitch(x, dim) is not None:
            if not pending:
                first = at
            pending.append(x)
            at += size
            if len(pending) == CAT_PIECES:
                flush()
            continue
        flush()
        p.copy(to.narrow(dim, at, size), x)
        at += size
    flush()


def join_rows(p: Planner, to: Value, tensors: Sequence[Value], dim: int) -> None:
    """One step of the kernel `cat`; rows are the dimensions from `dim` on."""
    itemsize = to.itemsize
    pitches = [row_pitch(x, dim) or 0 for x in tensors]
    p.step(
        "cat",
        writes=(to,),
        shares=shares_of(to.numel, itemsize),
        work=to.numel * itemsize * 0.02,
        out=to,
        rows=math.prod(to.shape[:dim]),
        out_pitch=(row_pitch(to, dim) or 0) * itemsize,
        count=len(tensors),
        bytes=[math.prod(x.shape[dim:]) * itemsize for x in tensors],
        source_pitch=[pitch * itemsize for pitch in pitches],
        source=list(tensors),
    )


@lowers("aten::block_diag")
def _block_diag(p: Planner, out: Meta, tensors: Sequence[Value]) -> Value:
    to = filled(p, out)
    row = column = 0
    for x in tensors:
        block = reshaped(p, x, (1, x.numel)) if len(x.shape) < 2 else x
        height, width = block.shape
        p.copy(to.narrow(0, row, height).narrow(1, column, width), block)
        row, column = row + height, column + width
    return to


@lowers("aten::index_select")
def _index_select(p: Planner, out: Meta, x: Value, dim: int, index: Value) -> Value:
    to = p.like(out)
    if not x.shape:  # a number is picked from itself
        pick(p, to.view((1,)), x.view((1,)), 0, index.view((1,)))
        return to
    pick(p, to, x, dim % len(x.shape), index.view((index.numel,)))
    return to


@lowers("aten::embedding")
def embedding(
    p: Planner, out: Meta, weight: Value, indices: Value, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    """What remains are arguments of the gradient."""
    to = p.like(out)
    pick(p, to.view((indices.numel, weight.shape[1])), weight, 0, reshaped(p, indices, (indices.numel,)))
    return to


def pick(p: Planner, to: Value, x: Value, dim: int, index: Value, *, negative: bool = False) -> None:
    """to[..., i, ...] = x[..., index[i], ...] along `dim`; `index` has one dimension."""
    from outlast.executor.lowering.indexing import Picked, indexed, without

    if to.numel == 0:
        return
    itemsize, pitch = x.itemsize, row_pitch(x, dim + 1)
    error = int(dim == 1 and not negative)  # eager's index_select has an implementation of its own for dimension 1
    outer_pitch = row_pitch(x.narrow(dim, 0, 1), dim) if x.shape[dim] > 0 else None
    if not to.is_contiguous or pitch is None or outer_pitch is None:
        places = Picked(along(p.cast(index, "i64"), dim, to.shape), x.shape[dim], x.stride[dim], dim)
        indexed(
            p,
            "index_get",
            x,
            without(x.stride, dim),
            to,
            [places],
            negative=negative,
            error=int(dim == 1 and not negative),
        )
        return
    p.step(
        "rows_pick",
        writes=(to,),
        shares=shares_of(to.numel, itemsize),
        work=to.numel * itemsize * 0.05,
        out=to,
        data=x,
        index=index,
        outer=math.prod(to.shape[:dim]),
        count=index.shape[0],
        bytes=math.prod(to.shape[dim + 1 :]) * itemsize,
        pitch=x.stride[dim] * itemsize,
        outer_pitch=outer_pitch * itemsize,
        limit=x.shape[dim],
        index_stride=index.stride[0],
        wide=int(index.dtype == "i64"),
        negative=int(negative),
        dim=dim,
        error=error,
    )


def along(index: Value, dim: int, shape: Sequence[int]) -> Value:
    """A tensor of one dimension, laid along `dim` of `shape` and broadcast over the others."""
    lined = index
    for _ in range(len(shape) - 1 - dim):
        lined = lined.unsqueeze(len(lined.shape))
    return lined.expand(shape)


@lowers("aten::repeat")
def _repeat(p: Planner, out: Meta, x: Value, repeats: Sequence[int]) -> Value:
    to = p.like(out)
    if out.numel == 0:
        return to
    shape = (1,) * (len(repeats) - len(x.shape)) + x.shape
    pairs = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    tiled = x.expand(shape)
    for d in range(len(repeats)):
        tiled = tiled.unsqueeze(2 * d)
    p.copy(to.view(pairs), tiled.expand(pairs))
    return to


@lowers("aten::flip")
def _flip(p: Planner, out: Meta, x: Value, dims: Sequence[int]) -> Value:
    return cloned(p, out, flipped(x, dims))


@lowers("aten::rot90")
def _rot90(p: Planner, out: Meta, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Value:
    first, second = (d % len(x.shape) for d in dims)
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    turned = (x, flipped(x, (second,)).permute(order), flipped(x, (first, second)), flipped(x, (first,)).permute(order))
    return cloned(p, out, turned[k % 4])


@lowers("aten::roll")
def _roll(p: Planner, out: Meta, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    to = p.like(out)
    if out.numel == 0:
        return to
    if len(dims) == 0:  # the tensor as one row
        target, source, total = to.view((to.numel,)), reshaped(p, x, (x.numel,)), {0: shifts[0]}
    else:
        target, source, total = to, x, {}
        for shift, dim in zip(shifts, dims, strict=True):
            total[dim % len(x.shape)] = total.get(dim % len(x.shape), 0) + shift
    segments: list[list[Segment]] = []
    for dim, size in enumerate(source.shape):
        shift = total.get(dim, 0) % size
        segments.append([(0, size, 0, 1)] if shift == 0 else [(0, shift, size - shift, 1), (shift, size - shift, 0, 1)])
    mosaic(p, target, source, segments)
    return to


@lowers("aten::constant_pad_nd")
def constant_pad_nd(p: Planner, out: Meta, x: Value, pad: Sequence[int], value: float | int | bool = 0) -> Value:
    """Negative padding cuts off."""
    to = p.like(out)
    target, source = to, x
    for i in range(len(pad) // 2):
        dim, before, after = len(x.shape) - 1 - i, pad[2 * i], pad[2 * i + 1]
        length = x.shape[dim] + min(0, before) + min(0, after)
        if length <= 0:
            target = target.narrow(dim, 0, 0)
            continue
        target = target.narrow(dim, max(0, before), length)
        source = source.narrow(dim, max(0, -before), length)
    if max(pad, default=0) > 0:
        p.copy(to, p.scalar(value, out.dtype))
    if target.numel != 0:
        p.copy(target, source)
    return to


def _padded(p: Planner, out: Meta, x: Value, padding: Sequence[int], *, mirror: bool) -> Value:
    to = p.like(out)
    segments: list[list[Segment]] = [[(0, size, 0, 1)] for size in x.shape]
    for i in range(len(padding) // 2):
        dim, before, after = len(x.shape) - 1 - i, padding[2 * i], padding[2 * i + 1]
        if before < 0 or after < 0:
            raise Unsupported("negative padding of this kind")
        size, pieces = x.shape[dim], [(before, x.shape[dim], 0, 1)]
        if mirror:
            pieces += [(0, before, before, -1), (before + size, after, size - 2, -1)]
        else:
            pieces += [(0, before, 0, 0), (before + size, after, size - 1, 0)]
        segments[dim] = [piece for piece in pieces if piece[1] != 0]
    if out.numel != 0:
        mosaic(p, to, x, segments)
    return to


@lowers("aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d")
def _reflection_pad(p: Planner, out: Meta, x: Value, padding: Sequence[int]) -> Value:
    return _padded(p, out, x, padding, mirror=True)


@lowers("aten::replication_pad1d", "aten::replication_pad2d", "aten::replication_pad3d")
def _replication_pad(p: Planner, out: Meta, x: Value, padding: Sequence[int]) -> Value:
    return _padded(p, out, x, padding, mirror=False)


@lowers("aten::tril")
def _tril(p: Planner, out: Meta, x: Value, diagonal: int = 0) -> Value:
    return _triangle(p, out, x, diagonal, upper=False)


@lowers("aten::triu")
def _triu(p: Planner, out: Meta, x: Value, diagonal: int = 0) -> Value:
    return _triangle(p, out, x, diagonal, upper=True)


def _triangle(p: Planner, out: Meta, x: Value, diagonal: int, *, upper: bool) -> Value:
    to = p.like(out)
    if out.numel != 0:
        p.step(
            "triangle",
            writes=(to,),
            shares=shares_of(to.numel, to.itemsize),
            work=to.numel * to.itemsize * 0.05,
            out=to,
            dims=len(x.shape),
            upper=int(upper),
            diagonal=diagonal,
            size=x.shape,
            out_stride=to.stride,
            source_stride=x.stride,
            bytes=to.itemsize,
            source=x,
        )
    return to


@lowers("aten::pixel_shuffle")
def _pixel_shuffle(p: Planner, out: Meta, x: Value, upscale_factor: int) -> Value:
    r, to = upscale_factor, p.like(out)
    if out.numel == 0:
        return to
    *lead, channels, height, width = x.shape
    n = len(lead)
    fine = reshaped(p, x, (*lead, channels // (r * r), r, r, height, width))
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    p.copy(to.view((*lead, channels // (r * r), height, r, width, r)), fine.permute(order))
    return to


@lowers("aten::pixel_unshuffle")
def _pixel_unshuffle(p: Planner, out: Meta, x: Value, downscale_factor: int) -> Value:
    r, to = downscale_factor, p.like(out)
    if out.numel == 0:
        return to
    *lead, channels, height, width = x.shape
    n = len(lead)
    fine = reshaped(p, x, (*lead, channels, height // r, r, width // r, r))
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    p.copy(to.view((*lead, channels, r, r, height // r, width // r)), fine.permute(order))
    return to


@lowers("aten::channel_shuffle")
def _channel_shuffle(p: Planner, out: Meta, x: Value, groups: int) -> Value:
    to = p.like(out)
    if out.numel == 0:
        return to
    batch, channels, *rest = x.shape
    split = reshaped(p, x, (batch, groups, channels // groups, *rest))
    p.copy(to.view((batch, channels // groups, groups, *rest)), split.permute((0, 2, 1, *range(3, len(split.shape)))))
    return to
