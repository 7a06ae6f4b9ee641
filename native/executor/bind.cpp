// Python face of the shipped operators, of plans in memory, and of replays.
#include "operators.hpp"
#include "program.hpp"
#include "replay.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
using namespace outlast;

namespace {

using StepTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>;
using PatchTuple = std::tuple<int64_t, uint32_t, int64_t>;  // slot -1 = the block itself
using KeyTuple = std::tuple<uint16_t, std::vector<int64_t>, std::vector<int64_t>>;

std::vector<TensorKey> keys_of(const std::vector<KeyTuple>& given) {
    std::vector<TensorKey> out;
    for (const auto& [dtype, shape, strides] : given) out.push_back({dtype, shape, strides});
    return out;
}

PyObject* call_replay(PyObject* self, PyObject* args, PyObject* keywords) {
    if (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "a replay takes its arguments by position");
        return nullptr;
    }
    try {
        return nb::inst_ptr<Replay>(self)->call(nb::borrow<nb::tuple>(args)).release().ptr();
    } catch (nb::python_error& e) {
        e.restore();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

PyType_Slot replay_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(&call_replay)},
    {Py_tp_traverse, reinterpret_cast<void*>(&Replay::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&Replay::drop)},
    {0, nullptr},
};

nb::tuple outcome(int32_t status, const Program& p, const char* text) { return nb::make_tuple(status, p.failed(), nb::str(text)); }

}  // namespace

NB_MODULE(_native, m) {
    // Compiled graphs live in caches of Dynamo that are never emptied, so that replays outlive the module at exit.
    nb::set_leak_warnings(false);
    m.doc() = "Shipped operators, plans in memory and replays. See outlast.executor for the typed layers.";
    m.def("isa", [] { return std::string(chosen_isa()); });
    m.def("operators", [](const std::string& isa) {
        nb::dict d;
        for (ShippedTable table : shipped_tables(isa.c_str()))
            for (; table->name != nullptr; ++table) d[table->name] = reinterpret_cast<uint64_t>(table->function);
        return d;
    }, "isa"_a);

    m.def("set_flush", &set_flush, "hook"_a.none());
    m.def("set_recording", &set_recording, "hook"_a.none());

    nb::class_<Program>(m, "Program")
        .def("__init__", [](Program* self, [[maybe_unused]] nb::object owner, uint64_t executor, nb::bytes block, uint64_t size, const std::vector<StepTuple>& steps,
                            const std::vector<PatchTuple>& patches, uint32_t slots, double estimate) {
            std::vector<Program::StepOf> s;
            for (const auto& [op, level, args, shares] : steps) s.push_back({op, level, args, shares});
            std::vector<Program::Patch> p;
            for (const auto& [slot, at, addend] : patches) p.push_back({slot < 0 ? Program::own_block : static_cast<uint32_t>(slot), at, addend});
            new (self) Program(reinterpret_cast<const ol_executor*>(executor), std::string(block.c_str(), block.size()), size, s, p, slots);
            self->estimate = estimate;
        }, "owner"_a, "executor"_a, "block"_a, "size"_a, "steps"_a, "patches"_a, "slots"_a, "estimate"_a,
           nb::keep_alive<1, 2>())  // the executor's native part outlives the plan, closed or not
        .def("bind", [](Program& p, uint32_t slot, uint64_t address) {
            if (slot >= p.slots()) throw nb::index_error("no such slot");
            p.bind(slot, address);
        }, "slot"_a, "address"_a)
        .def("run", [](Program& p, uint32_t first, uint32_t count, double timeout) {
            if (first > p.steps() || count > p.steps() - first) throw nb::index_error("no such steps");
            char text[256] = "";
            int32_t status;
            {
                nb::gil_scoped_release release;
                status = p.run(first, count, timeout, text, sizeof text);
            }
            return outcome(status, p, text);
        }, "first"_a, "count"_a, "timeout"_a)
        .def("run_timed", [](Program& p, uint32_t first, uint32_t count, double timeout) {
            if (first > p.steps() || count > p.steps() - first) throw nb::index_error("no such steps");
            char text[256] = "";
            std::vector<uint64_t> times;
            int32_t status;
            {
                nb::gil_scoped_release release;
                status = p.run_timed(first, count, timeout, times, text, sizeof text);
            }
            return nb::make_tuple(outcome(status, p, text), times);
        }, "first"_a, "count"_a, "timeout"_a)
        .def_prop_ro("block", &Program::block)
        .def_prop_ro("steps", &Program::steps)
        .def_prop_ro("runs", &Program::runs);

    nb::class_<Replay>(m, "Replay", nb::type_slots(replay_slots))
        .def(nb::init<nb::object, uint64_t, nb::object, nb::object, nb::object, double>(), "types"_a, "exchange"_a, "grad_enabled"_a, "miss"_a,
             "grad"_a, "timeout"_a)
        .def("add", [](Replay& r, const std::vector<KeyTuple>& inputs, const std::vector<uint32_t>& same_as, bool alias_sensitive,
                       const std::vector<nb::object>& constants, const std::vector<KeyTuple>& constant_keys, const std::vector<KeyTuple>& outputs,
                       const std::string& form, nb::object finish, nb::object python, nb::object program, size_t most) {
            Variant v;
            v.inputs = keys_of(inputs);
            v.same_as = same_as;
            v.alias_sensitive = alias_sensitive;
            v.constants = constants;
            v.constant_keys = keys_of(constant_keys);
            v.outputs = keys_of(outputs);
            v.form = form.at(0);
            v.finish = finish;
            v.python = python;
            v.program = program.is_none() ? nullptr : nb::cast<Program*>(program);
            v.program_owner = program;
            if (v.same_as.size() != v.inputs.size() || v.constants.size() != v.constant_keys.size()) throw nb::value_error("lengths differ");
            if (v.program != nullptr && v.program->slots() < v.inputs.size() + v.constants.size() + v.outputs.size())
                throw nb::value_error("the program has too few slots");
            r.add(std::move(v), most);
        }, "inputs"_a, "same_as"_a, "alias_sensitive"_a, "constants"_a, "constant_keys"_a, "outputs"_a, "form"_a, "finish"_a.none(),
           "python"_a.none(), "program"_a.none(), "most"_a)
        .def("clear", &Replay::clear)
        .def_prop_ro("variants", &Replay::size)
        .def_prop_ro("calls", &Replay::calls)
        .def_prop_ro("misses", &Replay::misses);
}
