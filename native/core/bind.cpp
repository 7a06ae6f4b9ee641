// Python face of the core: executor, log, CRC.  Addresses are plain integers; lifetimes are kept by the Python layer.
#include "crc32c.hpp"
#include "executor.hpp"
#include "log.hpp"
#include "log_ops.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace outlast;

namespace {

Clock::time_point deadline_in(double seconds) {
    if (!(seconds >= 0 && seconds <= 1e8)) seconds = 1e8;  // also for a NaN
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

nb::bytes bytes_of(const void* p, size_t n) { return nb::bytes(static_cast<const char*>(p), n); }

nb::dict describe(const Scan& s) {
    nb::dict d;
    nb::list segments;
    for (const SegmentReport& r : s.segments) {
        nb::dict x;
        x["segment"] = r.number;
        x["bytes"] = r.bytes;
        x["used"] = r.used;
        x["writer_epoch"] = r.writer_epoch;
        x["first_epoch"] = r.first_epoch;
        x["last_epoch"] = r.last_epoch;
        x["records"] = r.records;
        x["epochs"] = r.epochs;
        segments.append(x);
    }
    d["segments"] = segments;
    d["epochs"] = s.epochs;
    d["last_epoch"] = s.last_epoch;
    d["records"] = s.records.size();
    d["payload_bytes"] = s.payload_bytes;
    d["writer_epoch"] = s.max_writer_epoch;
    d["end_segment"] = s.end_segment;
    d["end_offset"] = s.end_offset;
    d["stop"] = s.stop;
    d["stop_segment"] = s.stop_segment;
    d["stop_offset"] = s.stop_offset;
    d["torn"] = s.torn;
    d["manifest_differs"] = s.manifest_differs;
    d["manifest"] = bytes_of(s.manifest.data(), 32);
    d["manifest_text"] = bytes_of(s.manifest_text.data(), s.manifest_text.size());
    return d;
}

// A store with the scan of what it holds; consumed by the writer.
struct OpenLog {
    ol_log_control* control;
    std::unique_ptr<SegmentStore> store;
    Scan scan;
};

std::unique_ptr<OpenLog> finish_open(uint64_t control, std::unique_ptr<SegmentStore> store, nb::object manifest) {
    auto out = std::make_unique<OpenLog>();
    out->control = reinterpret_cast<ol_log_control*>(control);
    out->store = std::move(store);
    if (manifest.is_none()) {
        nb::gil_scoped_release release;
        out->scan = scan_log(*out->store, out->control, nullptr);
    } else {
        const nb::bytes digest = nb::cast<nb::bytes>(manifest);
        if (digest.size() != 32) throw std::invalid_argument("a manifest digest has 32 bytes");
        const std::string copy(digest.c_str(), digest.size());
        nb::gil_scoped_release release;
        out->scan = scan_log(*out->store, out->control, reinterpret_cast<const uint8_t*>(copy.data()));
    }
    return out;
}

nb::tuple record_tuple(const ScannedRecord& r) {
    const ol_record& h = *r.header;
    return nb::make_tuple(h.type, h.region, h.generation, h.key, h.offset, h.count, h.length, reinterpret_cast<uint64_t>(r.payload), r.segment,
                          h.epoch, h.writer_epoch);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Executor, epoch log and CRC32C. See outlast.executor and outlast.core.log for the typed layers.";

    m.attr("abi_version") = OL_ABI_VERSION;
    m.def("crc32c", [](nb::bytes data, uint32_t crc) { return crc32c(crc, data.c_str(), data.size()); }, "data"_a, "crc"_a = 0);
    m.def("crc32c_table", [](nb::bytes data, uint32_t crc) { return crc32c_table(crc, data.c_str(), data.size()); }, "data"_a, "crc"_a = 0);
    m.def("crc32c_at", [](uint64_t address, size_t n, uint32_t crc) { return crc32c(crc, reinterpret_cast<const void*>(address), n); },
          "address"_a, "length"_a, "crc"_a = 0, nb::call_guard<nb::gil_scoped_release>());
    m.def("crc32c_copy", [](uint64_t to, uint64_t from, size_t n) { return crc32c_copy(0, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), n); },
          "to"_a, "from_"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("memcpy", [](uint64_t to, uint64_t from, size_t n) { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), n); },
          "to"_a, "from_"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("crc32c_kind", &crc32c_kind);

    nb::class_<Executor>(m, "Executor")
        .def("__init__", [](Executor* self, uint32_t capacity, uint32_t workers, uint64_t first_ticket, uint32_t operators, double idle_s,
                            double silence_s) {
            const auto ns = [](double seconds) { return seconds > 0 ? static_cast<uint64_t>(std::min(seconds, 1e8) * 1e9) : uint64_t{0}; };
            new (self) Executor(capacity, workers, Options{first_ticket, operators, ns(idle_s), ns(silence_s)});
        }, "capacity"_a, "workers"_a, "first_ticket"_a = 0, "operators"_a = Options{}.operators, "idle_s"_a = 0.0, "silence_s"_a = 0.0)
        .def("register_operator", &Executor::register_operator, "fn"_a, "abi"_a)
        .def("swap", [](Executor& e, uint32_t op, uint64_t fn, uint32_t abi, double timeout) { return e.swap(op, fn, abi, deadline_in(timeout)); },
             "op"_a, "fn"_a, "abi"_a, "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("rollback", [](Executor& e, uint32_t op, double timeout) { return e.rollback(op, deadline_in(timeout)); }, "op"_a, "timeout"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("quiescent", &Executor::quiescent, "op"_a)
        .def("slot", [](Executor& e, uint32_t op) {
            const ol_slot s = e.slot(op);
            return nb::make_tuple(s.word, s.fn[0], s.fn[1], s.flip_ticket, s.calls);
        }, "op"_a)
        .def("submit", [](Executor& e, uint32_t op, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t after, uint32_t part, uint32_t parts,
                          double timeout) {
            ol_task t{};
            t.op = op;
            t.after = after;
            t.part = static_cast<uint16_t>(part);
            t.parts = static_cast<uint16_t>(parts);
            t.arg[0] = a0;
            t.arg[1] = a1;
            t.arg[2] = a2;
            t.arg[3] = a3;
            return e.submit(t, deadline_in(timeout));
        }, "op"_a, "arg0"_a, "arg1"_a, "arg2"_a, "arg3"_a, "after"_a, "part"_a, "parts"_a, "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("wait", [](Executor& e, uint64_t ticket, double timeout, bool assist) { return e.wait(ticket, deadline_in(timeout), assist); },
             "ticket"_a, "timeout"_a, "assist"_a = true, nb::call_guard<nb::gil_scoped_release>())
        .def("run", [](Executor& e, uint64_t tasks, size_t count, double timeout) {
            TaskError error{0, 0, 0, ""};
            int32_t status;
            {
                nb::gil_scoped_release release;
                status = e.run(reinterpret_cast<const ol_task*>(tasks), count, deadline_in(timeout), error);
            }
            return nb::make_tuple(status, error.ticket, error.op, error.text);
        }, "tasks"_a, "count"_a, "timeout"_a)
        .def("status", [](Executor& e, uint64_t ticket) {
            std::string text;
            const int32_t s = e.status(ticket, &text);
            return nb::make_tuple(s, text);
        }, "ticket"_a)
        .def("stop", [](Executor& e, double timeout) { return e.stop(deadline_in(timeout)); }, "timeout"_a = 1e9,
             nb::call_guard<nb::gil_scoped_release>())
        .def("abandon", [](nb::handle self, nb::handle keep) {  // a thread of it still runs: both stay for ever
            self.inc_ref();
            keep.inc_ref();
            nb::set_leak_warnings(false);
        }, "keep"_a)
        .def("park", [](Executor& e, bool drain, double timeout) { return e.park(drain, deadline_in(timeout)); }, "drain"_a, "timeout"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("resume", &Executor::resume, nb::call_guard<nb::gil_scoped_release>())
        .def("beat", &Executor::beat, nb::call_guard<nb::gil_scoped_release>())
        .def("counts", [](Executor& e, uint32_t op) {
            const OperatorCounts c = e.counts(op);
            return nb::make_tuple(c.calls, c.failures, c.samples, c.ns);
        }, "op"_a)
        .def("plan_counts", [](Executor& e) {
            const PlanCounts c = e.plan_counts();
            return nb::make_tuple(c.plans, c.tasks, c.timed, c.ns, c.operators_ns, c.waits_ns);
        })
        .def_prop_ro("away", [](Executor& e) { return static_cast<uint32_t>(e.away()); })
        .def_prop_ro("present", &Executor::present)
        .def_prop_ro("head", &Executor::head)
        .def_prop_ro("refused", &Executor::refused)
        .def_prop_ro("sequence", [](Executor& e) { return e.api()->sequence; })
        .def("set_heartbeat", &Executor::set_heartbeat, "address"_a)
        .def_prop_ro("api", [](Executor& e) { return reinterpret_cast<uint64_t>(e.api()); })
        .def_prop_ro("executed", &Executor::executed)
        .def_prop_ro("completed", &Executor::completed)
        .def_prop_ro("tail", &Executor::tail)
        .def_prop_ro("capacity", &Executor::capacity)
        .def_prop_ro("workers", &Executor::workers);

    nb::class_<OpenLog>(m, "OpenLog", nb::is_weak_referenceable())
        .def("describe", [](OpenLog& l) { return describe(l.scan); })
        .def("commit_behind", [](OpenLog& l) {
            if (!l.store) throw std::invalid_argument("this log already has its writer");
            return commit_behind(*l.store, l.scan);
        })
        .def("records", [](OpenLog& l) {
            nb::list out;
            for (const ScannedRecord& r : l.scan.records) out.append(record_tuple(r));
            return out;
        });
    m.def("open_arena", [](uint64_t base, uint64_t bytes, nb::object manifest) {
        return finish_open(base, arena_store(reinterpret_cast<uint8_t*>(base), bytes), manifest);
    }, "base"_a, "bytes"_a, "manifest"_a.none());
    m.def("open_files", [](uint64_t control, const std::string& directory, uint64_t max_segments, bool writable, bool durable, nb::object manifest) {
        const auto* c = reinterpret_cast<const ol_log_control*>(control);
        return finish_open(control, file_store(directory, c->segment_bytes, max_segments, writable, durable), manifest);
    }, "control"_a, "directory"_a, "max_segments"_a, "writable"_a, "durable"_a, "manifest"_a.none());

    nb::class_<LogWriter>(m, "LogWriter")
        .def("__init__", [](LogWriter* self, OpenLog& log, uint64_t writer_epoch, nb::bytes manifest, nb::bytes text, bool cold, bool durable) {
            if (manifest.size() != 32) throw std::invalid_argument("a manifest digest has 32 bytes");
            if (!log.store) throw std::invalid_argument("this log already has its writer");
            new (self) LogWriter(std::move(log.store), log.control, writer_epoch, reinterpret_cast<const uint8_t*>(manifest.c_str()),
                                 std::string(text.c_str(), text.size()), log.scan, cold, durable);
        }, "log"_a, "writer_epoch"_a, "manifest"_a, "text"_a, "cold"_a, "durable"_a, nb::keep_alive<1, 2>())  // the mapping hangs on the OpenLog
        .def("begin", &LogWriter::begin, "bytes"_a, "records"_a)
        .def("append", [](LogWriter& w, uint16_t type, uint32_t region, uint32_t generation, uint64_t key, uint32_t offset, uint32_t count, nb::bytes data) {
            if (data.size() > UINT32_MAX) throw LogError(LogError::Kind::refused, "a record holds less than 4 GiB");
            w.append({type, region, generation, key, offset, count}, data.c_str(), static_cast<uint32_t>(data.size()));
        }, "type"_a, "region"_a, "generation"_a, "key"_a, "offset"_a, "count"_a, "payload"_a)
        .def("append_at", [](LogWriter& w, uint16_t type, uint32_t region, uint32_t generation, uint64_t key, uint32_t offset, uint32_t count, uint64_t address,
                             uint32_t length) {
            w.append({type, region, generation, key, offset, count}, reinterpret_cast<const void*>(address), length);
        }, "type"_a, "region"_a, "generation"_a, "key"_a, "offset"_a, "count"_a, "address"_a, "length"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("reserve", [](LogWriter& w, uint16_t type, uint32_t region, uint32_t generation, uint64_t key, uint32_t offset, uint32_t count, uint32_t length) {
            uint32_t handle = 0;
            uint8_t* p = w.reserve({type, region, generation, key, offset, count}, length, &handle);
            return nb::make_tuple(reinterpret_cast<uint64_t>(p), handle);
        }, "type"_a, "region"_a, "generation"_a, "key"_a, "offset"_a, "count"_a, "length"_a)
        .def("seal", &LogWriter::seal, "handle"_a)
        .def("commit", &LogWriter::commit, nb::call_guard<nb::gil_scoped_release>())
        .def("abort", &LogWriter::abort)
        .def("roll", &LogWriter::roll)
        .def("records_of", [](LogWriter& w, uint64_t segment, uint64_t key) {
            nb::list out;
            for (const ScannedRecord& r : w.records_of(segment, key)) out.append(record_tuple(r));
            return out;
        }, "segment"_a, "key"_a)
        .def("release_before", &LogWriter::release_before, "segment"_a)
        .def_prop_ro("address", [](LogWriter& w) { return reinterpret_cast<uint64_t>(&w); })
        .def_prop_ro("in_epoch", &LogWriter::in_epoch)
        .def_prop_ro("epoch", &LogWriter::epoch)
        .def_prop_ro("committed_epoch", &LogWriter::committed_epoch)
        .def_prop_ro("writer_epoch", &LogWriter::writer_epoch)
        .def_prop_ro("segment", &LogWriter::segment)
        .def_prop_ro("oldest_segment", &LogWriter::oldest_segment)
        .def_prop_ro("places_left", &LogWriter::places_left)
        .def_prop_ro("bytes_appended", &LogWriter::bytes_appended)
        .def_prop_ro("used_bytes", &LogWriter::used_bytes)
        .def_prop_ro("segment_bytes", &LogWriter::segment_bytes);

    nb::class_<StepPlan>(m, "StepPlan")
        .def("__init__", [](StepPlan* self, LogWriter& log, uint32_t kv_region, uint32_t request_region, uint64_t pool,
                            std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t> g, uint32_t delta, uint32_t digest, uint32_t seal,
                            uint32_t finish) {
            const ol_kv_geometry geometry{std::get<0>(g), std::get<1>(g), std::get<2>(g), std::get<3>(g), std::get<4>(g), std::get<5>(g)};
            new (self) StepPlan(log, kv_region, request_region, pool, geometry, {delta, digest, seal, finish});
        }, "log"_a, "kv_region"_a, "request_region"_a, "pool"_a, "geometry"_a, "delta"_a, "digest"_a, "seal"_a, "finish"_a, nb::keep_alive<1, 2>())
        .def("need", [](StepPlan& p, uint64_t writes, size_t count) {
            const auto n = p.need(reinterpret_cast<const ol_step_write*>(writes), count);
            return nb::make_tuple(n.bytes, n.records);
        }, "writes"_a, "count"_a)
        .def("build", [](StepPlan& p, uint64_t tasks, size_t count, uint64_t writes, size_t writes_count, uint64_t number) {
            p.build(reinterpret_cast<const ol_task*>(tasks), count, reinterpret_cast<const ol_step_write*>(writes), writes_count, number);
            return nb::make_tuple(reinterpret_cast<uint64_t>(p.tasks().data()), p.tasks().size());
        }, "tasks"_a, "count"_a, "writes"_a, "writes_count"_a, "number"_a = 0);

    m.def("log_operators", [] {
        nb::dict d;
        d["log_seal"] = reinterpret_cast<uint64_t>(&log_seal);
        d["log_finish"] = reinterpret_cast<uint64_t>(&log_finish);
        return d;
    });
    m.attr("STATUS_FENCED") = status_fenced;
    m.attr("STATUS_DURABILITY") = status_durability;
    m.attr("STATUS_REFUSED") = status_refused;
    m.def("arm_kill_point", &arm_kill_point, "name"_a, "countdown"_a);
    m.def("kill_points", &kill_points);
    m.def("reach_kill_point", [](const std::string& name) { reach_kill_point(name.c_str()); }, "name"_a);

    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const LogError& e) {
            const char* name = e.kind == LogError::Kind::fenced       ? "Fenced"
                               : e.kind == LogError::Kind::durability ? "DurabilityLost"
                               : e.kind == LogError::Kind::corrupt    ? "CorruptState"
                                                                      : "Refused";
            nb::object type = nb::module_::import_("outlast.core.errors").attr(name);
            PyErr_SetString(type.ptr(), e.what());
        }
    });
}
