"""Kernels of the family movement: elements are moved by their size, so one kernel serves many element types."""

from __future__ import annotations

from . import Kernel

#: name of a way to join -> OL_COMBINE_... in outlast/ops/indexing.h
COMBINE = {"add": 0, "mul": 1, "min": 2, "max": 3}

KERNELS: list[Kernel] = [
    Kernel("cat", "movement.h", "ol_cat_args", "ol_cat"),
    Kernel("rows_pick", "movement.h", "ol_pick_args", "ol_rows_pick"),
    Kernel("triangle", "movement.h", "ol_triangle_args", "ol_triangle"),
    Kernel("index_get", "indexing.h", "ol_index_args", "ol_index_get"),
    Kernel("index_set", "indexing.h", "ol_index_args", "ol_index_set"),
    Kernel("masked_scatter", "indexing.h", "ol_masked_args", "ol_masked_scatter"),
    Kernel("searchsorted", "indexing.h", "ol_search_args", "ol_searchsorted"),
    *(
        Kernel(f"index_{kind}", "indexing.h", "ol_index_args", f"ol_index_combine<{number}>")
        for kind, number in COMBINE.items()
    ),
]
