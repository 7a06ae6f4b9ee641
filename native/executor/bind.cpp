// Python face of the shipped operators.
#include "operators.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace outlast;

NB_MODULE(_native, m) {
    m.doc() = "Shipped operators and replay of captured plans. See outlast.executor for the typed layers.";
    m.def("isa", [] { return std::string(chosen_isa()); });
    m.def("operators", [](const std::string& isa) {
        nb::dict d;
        for (ShippedTable table : shipped_tables(isa.c_str()))
            for (; table->name != nullptr; ++table) d[table->name] = reinterpret_cast<uint64_t>(table->function);
        return d;
    }, "isa"_a);
}
