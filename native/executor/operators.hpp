// Shipped operators: one table per family and instruction set (the files are written by generate.py).
#pragma once
#include "outlast/task.h"

#include <vector>

namespace outlast {

struct ShippedOperator {
    const char* name;
    ol_op_fn function;
};

using ShippedTable = const ShippedOperator*;  // ends with a null name

// Tables of every family for the instruction set `name` (generic, avx2, avx512); empty if it was not built.
std::vector<ShippedTable> shipped_tables(const char* isa);
// What this CPU runs best; OUTLAST_ISA overrules.
const char* chosen_isa();

}  // namespace outlast

// OL_ISA is set by the build: generic, avx2 or avx512.
#define OL_TABLE_NAME2(family, isa) outlast_table_##family##_##isa
#define OL_TABLE_NAME1(family, isa) OL_TABLE_NAME2(family, isa)
#define OL_TABLE(family, table)                                                                                        \
    extern const outlast::ShippedTable OL_TABLE_NAME1(family, OL_ISA);                                                 \
    const outlast::ShippedTable OL_TABLE_NAME1(family, OL_ISA) = table;
