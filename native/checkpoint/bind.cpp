// Python face of the checkpoint package's native part: shipped handlers, page hashes, write tracking.
#include "outlast/ops/bytes.h"
#include "outlast/ops/kv_digest.h"
#include "page_hash.hpp"
#include "write_tracker.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <system_error>

namespace nb = nanobind;
using namespace nb::literals;
using namespace outlast;

NB_MODULE(_native, m) {
    m.doc() = "Shipped checkpoint handlers, page hashes and write tracking. See outlast.checkpoint.";
    m.def("operators", [] {
        nb::dict d;
        d["kv_delta"] = reinterpret_cast<uint64_t>(&kv_delta);
        d["kv_apply"] = reinterpret_cast<uint64_t>(&kv_apply);
        d["kv_digest"] = reinterpret_cast<uint64_t>(&kv_digest);
        d["bytes_delta"] = reinterpret_cast<uint64_t>(&bytes_delta);
        d["bytes_apply"] = reinterpret_cast<uint64_t>(&bytes_apply);
        return d;
    });
    m.def("hash_page", [](nb::bytes page, uint64_t seed) {
        if (page.size() != 4096) throw std::invalid_argument("a page has 4096 bytes");
        std::vector<uint32_t> key(OL_NH_KEY_WORDS);
        ol_nh_key(seed, key.data());
        const ol_digest d = hash_page(key.data(), page.c_str());
        return nb::bytes(reinterpret_cast<const char*>(d.v), sizeof d.v);
    }, "page"_a, "seed"_a);
    nb::class_<PageHashes>(m, "PageHashes")
        .def(nb::init<uint64_t, uint64_t, uint64_t>(), "base"_a, "bytes"_a, "seed"_a)
        .def("scan", [](PageHashes& p, uint64_t from, size_t limit, uint64_t out) {
            std::vector<uint64_t> found;
            uint64_t next = 0;
            {
                nb::gil_scoped_release release;
                p.scan(from, limit, reinterpret_cast<uint8_t*>(out), found, next);
            }
            return std::make_pair(found, next);
        }, "from_"_a, "limit"_a, "out"_a)
        .def("reset", &PageHashes::reset)
        .def_prop_ro("pages", &PageHashes::pages);
    nb::class_<WriteTracker>(m, "WriteTracker")
        .def(nb::init<uint64_t, uint64_t>(), "base"_a, "bytes"_a)
        .def("collect", &WriteTracker::collect, nb::call_guard<nb::gil_scoped_release>());
    m.def("write_tracker_trouble", &write_tracker_trouble);
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const std::system_error& e) {
            PyErr_SetString(PyExc_OSError, e.what());
        }
    });
}
