"""Kernels of the family reduce."""

from __future__ import annotations

from . import DTYPES, FLOATS, Kernel

#: element types that are compared and counted: a bool goes as u8, i8 and i16 are converted to i32
ORDERED = ("u8", "i32", "i64", "f16", "bf16", "f32", "f64")


def _cpp(dtype: str) -> str:
    """Integers are added and multiplied modulo 2^64."""
    return "uint64_t" if dtype == "i64" else DTYPES[dtype][1]


def _kernel(name: str, function: str) -> Kernel:
    return Kernel(name, "reduce.h", "ol_reduce_args", function)


KERNELS: list[Kernel] = [
    *(_kernel(f"sum_{t}", f"ol_reduce<{_cpp(t)}, ol_op_sum>") for t in (*FLOATS, "i64")),
    *(_kernel(f"prod_{t}", f"ol_reduce<{_cpp(t)}, ol_op_prod>") for t in (*FLOATS, "i64")),
    *(_kernel(f"nansum_{t}", f"ol_reduce<{DTYPES[t][1]}, ol_op_nansum>") for t in FLOATS),
    *(_kernel(f"amax_{t}", f"ol_reduce<{DTYPES[t][1]}, ol_op_max>") for t in ORDERED),
    *(_kernel(f"amin_{t}", f"ol_reduce<{DTYPES[t][1]}, ol_op_min>") for t in ORDERED),
    *(_kernel(f"argmax_{t}", f"ol_arg_reduce<{DTYPES[t][1]}, ol_op_max>") for t in ORDERED),
    *(_kernel(f"argmin_{t}", f"ol_arg_reduce<{DTYPES[t][1]}, ol_op_min>") for t in ORDERED),
    *(_kernel(f"count_{t}", f"ol_count<{DTYPES[t][1]}>") for t in ORDERED),
    *(_kernel(f"norm_{t}", f"ol_norm<{DTYPES[t][1]}>") for t in FLOATS),
    *(_kernel(f"var_{t}", f"ol_var<{DTYPES[t][1]}>") for t in FLOATS),
    *(Kernel(f"nll_{t}", "reduce.h", "ol_nll_args", f"ol_nll<{DTYPES[t][1]}>") for t in FLOATS),
    *(_kernel(f"logsumexp_{t}", f"ol_logsumexp<{DTYPES[t][1]}>") for t in FLOATS),
]
