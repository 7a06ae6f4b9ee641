"""Kernels of the family rows."""

from __future__ import annotations

from . import DTYPES, FLOATS, Kernel
from .reduce import ORDERED

#: softmax and other operators on [outer, n, inner]
_ROWS = ("rows.h", "ol_rows_args")
_NORM = ("rows.h", "ol_norm_args")
_CHANNEL = ("rows.h", "ol_channel_args")
_ORDER = ("order.h", "ol_rows_args")


def _each(dtypes: tuple[str, ...], name: str, place: tuple[str, str], function: str) -> list[Kernel]:
    """One kernel for each element type; T stands for it in `function`. Integers are added modulo 2^64."""
    names = {dtype: DTYPES[dtype][1] for dtype in dtypes}
    if place is _ROWS and "i64" in names:
        names["i64"] = "uint64_t" if "ol_scan<" in function else "int64_t"
    return [Kernel(f"{name}_{dtype}", *place, function.replace("T", cpp)) for dtype, cpp in names.items()]


KERNELS: list[Kernel] = [
    *_each(FLOATS, "softmax", _ROWS, "ol_softmax<T, false>"),
    *_each(FLOATS, "log_softmax", _ROWS, "ol_softmax<T, true>"),
    *_each(FLOATS, "softmax_backward", _ROWS, "ol_softmax_backward<T, false>"),
    *_each(FLOATS, "log_softmax_backward", _ROWS, "ol_softmax_backward<T, true>"),
    *_each(FLOATS, "layer_norm", _NORM, "ol_layer_norm<T>"),
    *_each(FLOATS, "layer_norm_backward", _NORM, "ol_layer_norm_backward<T>"),
    *_each(FLOATS, "layer_norm_backward_weight", _NORM, "ol_layer_norm_backward_weight<T>"),
    *_each(FLOATS, "rms_norm", _NORM, "ol_rms_norm<T>"),
    *_each(FLOATS, "group_norm", _CHANNEL, "ol_group_norm<T>"),
    *_each(FLOATS, "batch_norm", _CHANNEL, "ol_batch_norm<T>"),
    *_each((*FLOATS, "i64"), "cumsum", _ROWS, "ol_scan<T, ol_scan_sum>"),
    *_each((*FLOATS, "i64"), "cumprod", _ROWS, "ol_scan<T, ol_scan_prod>"),
    *_each(FLOATS, "logcumsumexp", _ROWS, "ol_scan<T, ol_scan_logsumexp>"),
    *_each(ORDERED, "cummax", _ROWS, "ol_scan_extremum<T, ol_op_max>"),
    *_each(ORDERED, "cummin", _ROWS, "ol_scan_extremum<T, ol_op_min>"),
    *_each(ORDERED, "order", _ORDER, "ol_order<T>"),
    *_each(ORDERED, "select", _ORDER, "ol_select<T>"),
]
