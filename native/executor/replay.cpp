#include "replay.hpp"

#include "dlpack.hpp"
#include "outputs.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace outlast {

namespace {

// Both live on the stack: 56 KiB.  A compiled model has its parameters as arguments, its gradients as outputs.  Known to
// outlast.executor.replay as MOST_TENSORS.
constexpr size_t most_arguments = 1024, most_outputs = 1024;
// Plans shorter than this keep the interpreter's lock: giving it up and taking it again costs some 100 ns, more when
// other threads want it.
constexpr double keep_lock_ns = 20000;

bool fits(const TensorKey& key, const dlpack::Tensor& t) {
    if (t.device.type != dlpack::cpu || t.dtype.lanes != 1) return false;
    // 0xffff: a constant of a type that only PyTorch works on.
    if (key.dtype != 0xffff && key.dtype != (static_cast<uint16_t>(t.dtype.code) << 8 | t.dtype.bits)) return false;
    const size_t n = key.shape.size();
    if (static_cast<size_t>(t.ndim) != n) return false;
    for (size_t i = 0; i < n; ++i)
        if (t.shape[i] != key.shape[i] || t.strides[i] != key.strides[i]) return false;
    return true;
}

// A number from all that a variant's inputs must be equal in; the last word on equality has fits().
struct Hash {
    uint64_t value = 0x9e3779b97f4a7c15u;
    void add(uint64_t x) { value = (value ^ x) * 0xff51afd7ed558ccdu, value ^= value >> 32; }
    void add(uint16_t dtype, size_t dims, const int64_t* shape, const int64_t* strides) {
        add(static_cast<uint64_t>(dtype) << 8 | dims);
        for (size_t i = 0; i < dims; ++i) add(static_cast<uint64_t>(shape[i])), add(static_cast<uint64_t>(strides[i]));
    }
};

uint64_t address_of(const dlpack::Tensor& t) { return reinterpret_cast<uint64_t>(t.data) + t.byte_offset; }

// First and last byte (exclusive) that a tensor may touch.
std::pair<uint64_t, uint64_t> span(const TensorKey& key, uint64_t address) {
    const int64_t item = (key.dtype & 0xff) / 8;
    int64_t low = 0, high = 0;
    for (size_t i = 0; i < key.shape.size(); ++i) {
        if (key.shape[i] == 0) return {address, address};
        const int64_t reach = (key.shape[i] - 1) * key.strides[i];
        (reach < 0 ? low : high) += reach;
    }
    return {address + static_cast<uint64_t>(low * item), address + static_cast<uint64_t>((high + 1) * item)};
}

// Whether no two distinct tensors among a variant's arguments and constants share memory.
bool shares_nothing(const Variant& v, const uint64_t* addresses) {
    std::vector<std::pair<uint64_t, uint64_t>> spans;
    for (size_t i = 0; i < v.inputs.size(); ++i)
        if (v.same_as[i] == i) spans.push_back(span(v.inputs[i], addresses[i]));
    for (size_t i = 0; i < v.constants.size(); ++i) spans.push_back(span(v.constant_keys[i], v.constant_addresses[i]));
    std::erase_if(spans, [](const auto& s) { return s.first == s.second; });
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i)
        if (spans[i].first < spans[i - 1].second) return false;
    return true;
}

const dlpack::Exchange& table(const void* exchange) { return *static_cast<const dlpack::Exchange*>(exchange); }

nb::object new_tensor(const void* exchange, const TensorKey& key, uint64_t& address) {
    dlpack::Managed* made = new_output(key.dtype, key.shape, key.strides);
    address = address_of(made->tensor);
    void* object = nullptr;
    if (table(exchange).object_from_managed(made, &object) != 0) throw nb::python_error();  // it took the memory
    return nb::steal(static_cast<PyObject*>(object));
}

}  // namespace

Replay::Replay(nb::object types, uint64_t exchange, nb::object grad_enabled, nb::object miss, nb::object grad, double timeout_s)
    : types_(std::move(types)), grad_enabled_(std::move(grad_enabled)), miss_(std::move(miss)), grad_(std::move(grad)),
      exchange_(reinterpret_cast<const void*>(exchange)), timeout_s_(timeout_s) {
    size_t i = 0;
    for (nb::handle type : types_) {
        if (i == 2) throw std::invalid_argument("at most two tensor types");
        type_[i++] = reinterpret_cast<PyTypeObject*>(type.ptr());
    }
    if (exchange_ != nullptr && table(exchange_).version.major != 1) throw std::invalid_argument("another major version of DLPack");
}

void Replay::add(Variant&& variant, size_t most) {
    for (nb::object& constant : variant.constants) {
        dlpack::Tensor t;
        if (exchange_ == nullptr) break;
        if (table(exchange_).view_of_object(constant.ptr(), &t) != 0) throw nb::python_error();
    }
    if (variant.outputs.size() > most_outputs) throw std::invalid_argument("too many outputs");
    variant.constant_addresses.assign(variant.constants.size(), 0);
    variant.used = ++clock_;
    for (size_t i = 0; i < variant.inputs.size(); ++i)
        if (variant.inputs[i].maybe_negated()) variant.maybe_negated.push_back(static_cast<uint32_t>(i));
    Hash hash;
    for (const TensorKey& key : variant.inputs) hash.add(key.dtype, key.shape.size(), key.shape.data(), key.strides.data());
    hashes_.insert(hashes_.begin(), hash.value);
    variants_.insert(variants_.begin(), std::make_shared<Variant>(std::move(variant)));
    if (variants_.size() > most) {
        auto oldest = std::min_element(variants_.begin() + 1, variants_.end(), [](auto& a, auto& b) { return a->used < b->used; });
        dropped_calls_ += (*oldest)->calls;
        if (last_ == *oldest) last_ = nullptr;
        const std::shared_ptr<Variant> gone = std::move(*oldest);
        hashes_.erase(hashes_.begin() + (oldest - variants_.begin()));
        variants_.erase(oldest);  // before its objects are released, which may run Python code
    }
}

void Replay::clear() {
    last_ = nullptr;
    std::vector<std::shared_ptr<Variant>> gone;
    gone.swap(variants_);
    hashes_.clear();
}

uint64_t Replay::calls() const {
    uint64_t sum = dropped_calls_;
    for (const auto& v : variants_) sum += v->calls;
    return sum;
}

static PyObject* flush_hook = nullptr;
static PyObject* recording_hook = nullptr;

static void set_hook(PyObject*& which, nb::object hook) {
    PyObject* before = which;
    which = hook.is_none() ? nullptr : hook.release().ptr();
    Py_XDECREF(before);
}

void set_flush(nb::object hook) { set_hook(flush_hook, std::move(hook)); }

void set_recording(nb::object hook) { set_hook(recording_hook, std::move(hook)); }

nb::object Replay::call(nb::tuple arguments) {
    if (recording_hook != nullptr) [[unlikely]] {
        nb::object instead = nb::borrow(recording_hook)();
        if (!instead.is_none()) return instead(nb::find(this), arguments);
    }
    if (flush_hook != nullptr) nb::borrow(flush_hook)();
    PyObject* const* args = reinterpret_cast<PyTupleObject*>(arguments.ptr())->ob_item;
    const size_t count = arguments.size();
    if (exchange_ == nullptr || count > most_arguments) {
        ++misses_;
        return miss_(arguments);
    }
    dlpack::Tensor views[most_arguments];
    uint64_t addresses[most_arguments];
    bool plain = true;
    for (size_t i = 0; i < count && plain; ++i) {
        PyTypeObject* type = Py_TYPE(args[i]);
        plain = type == type_[0] || type == type_[1];
        if (plain && table(exchange_).view_of_object(args[i], &views[i]) != 0) {
            PyErr_Clear();  // a tensor that has no plain memory: the slow path says what it is
            plain = false;
        }
        if (plain) addresses[i] = address_of(views[i]);
    }
    const auto matches = [&](const Variant& v) {
        if (v.inputs.size() != count) return false;
        for (size_t i = 0; i < count; ++i) {
            if (!fits(v.inputs[i], views[i])) return false;
            if (v.same_as[i] != i && args[v.same_as[i]] != args[i]) return false;
        }
        return true;
    };
    std::shared_ptr<Variant> found;  // held: another thread may drop it as soon as Python code runs
    if (plain) {
        if (last_ != nullptr && matches(*last_)) {
            found = last_;
        } else {
            Hash hash;
            for (size_t i = 0; i < count; ++i)
                hash.add(static_cast<uint16_t>(views[i].dtype.code << 8 | views[i].dtype.bits), static_cast<size_t>(views[i].ndim), views[i].shape,
                         views[i].strides);
            for (size_t i = 0; i < hashes_.size() && found == nullptr; ++i)
                if (hashes_[i] == hash.value && matches(*variants_[i])) found = variants_[i];
        }
    }
    if (found != nullptr && !found->constants.empty()) {
        // A parameter may have got other memory since (`.data = ...`): its address is looked up each time.
        for (size_t i = 0; i < found->constants.size(); ++i) {
            dlpack::Tensor t;
            if (table(exchange_).view_of_object(found->constants[i].ptr(), &t) != 0) throw nb::python_error();
            if (!fits(found->constant_keys[i], t)) {
                found = nullptr;
                break;
            }
            found->constant_addresses[i] = address_of(t);
        }
    }
    if (found != nullptr && found->alias_sensitive && !shares_nothing(*found, addresses)) found = nullptr;
    if (found != nullptr) {
        static PyObject* const name = PyUnicode_InternFromString("is_neg");
        for (const uint32_t i : found->maybe_negated) {
            nb::object negated = nb::steal(PyObject_CallMethodNoArgs(args[i], name));
            if (!negated.is_valid()) throw nb::python_error();
            if (negated.ptr() != Py_True) continue;
            found = nullptr;
            break;
        }
    }
    if (found == nullptr) {
        ++misses_;
        return miss_(arguments);
    }
    // Autograd: with gradients on, and a tensor that wants one, eager would record; a replay can not.
    nb::object enabled = nb::steal(PyObject_CallNoArgs(grad_enabled_.ptr()));
    if (!enabled.is_valid()) throw nb::python_error();
    if (enabled.ptr() == Py_True) {
        static PyObject* const name = PyUnicode_InternFromString("requires_grad");
        const auto wants = [](PyObject* tensor) {
            nb::object answer = nb::steal(PyObject_GetAttr(tensor, name));
            if (!answer.is_valid()) throw nb::python_error();
            return answer.ptr() == Py_True;
        };
        bool wanted = false;
        for (size_t i = 0; i < count && !wanted; ++i) wanted = wants(args[i]);
        for (size_t i = 0; i < found->constants.size() && !wanted; ++i) wanted = wants(found->constants[i].ptr());
        if (wanted) return grad_(arguments);
    }
    last_ = found;
    found->used = ++clock_;
    ++found->calls;
    if (!found->python.is_none()) return found->python(arguments);
    return run(*found, arguments, addresses);
}

nb::object Replay::run(Variant& v, const nb::tuple& arguments, const uint64_t* addresses) {
    const size_t count = arguments.size();
    const nb::object owner = v.program_owner;  // whatever happens to the variant meanwhile
    Program& program = *v.program;
    const size_t outputs = v.outputs.size();
    const uint32_t first = static_cast<uint32_t>(count + v.constants.size());
    nb::object one, many;
    uint64_t made_at[most_outputs];
    if (outputs == 1) {
        one = new_tensor(exchange_, v.outputs[0], made_at[0]);
    } else {
        many = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs)));
        if (!many.is_valid()) throw nb::python_error();
        for (size_t i = 0; i < outputs; ++i) {
            nb::object made = new_tensor(exchange_, v.outputs[i], made_at[i]);
            PyTuple_SET_ITEM(many.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
        }
    }
    char text[256];
    text[0] = '\0';
    int32_t status;
    std::unique_lock turn(program.turn, std::try_to_lock);
    if (!turn.owns_lock()) {
        nb::gil_scoped_release release;
        turn.lock();
    }
    for (size_t i = 0; i < count; ++i) program.bind(static_cast<uint32_t>(i), addresses[i]);
    for (size_t i = 0; i < v.constants.size(); ++i) program.bind(static_cast<uint32_t>(count + i), v.constant_addresses[i]);
    for (size_t i = 0; i < outputs; ++i) program.bind(first + static_cast<uint32_t>(i), made_at[i]);
    if (program.estimate < keep_lock_ns) {
        status = program.run(0, program.steps(), timeout_s_, text, sizeof text);
    } else {
        nb::gil_scoped_release release;
        status = program.run(0, program.steps(), timeout_s_, text, sizeof text);
    }
    turn.unlock();
    if (status != OL_OK) {
        nb::module_::import_("outlast.executor.errors").attr("raise_step_failure")(v.program_owner, program.failed(), status, nb::str(text));
        throw std::logic_error("a failed step raised nothing");
    }
    switch (v.form) {
        case 's': return one;
        case 't':
            if (outputs == 1) return nb::make_tuple(one);
            return many;
        case 'l': return nb::steal(PySequence_List(outputs == 1 ? nb::make_tuple(one).ptr() : many.ptr()));
        default:
            return v.finish(arguments,
                            outputs == 1 ? nb::make_tuple(one) : nb::borrow<nb::tuple>(many));
    }
}

int Replay::traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    Replay* r = nb::inst_ptr<Replay>(self);
    for (nb::object* o : {&r->types_, &r->grad_enabled_, &r->miss_, &r->grad_}) Py_VISIT(o->ptr());
    for (const auto& v : r->variants_) {
        for (nb::object& c : v->constants) Py_VISIT(c.ptr());
        Py_VISIT(v->finish.ptr());
        Py_VISIT(v->python.ptr());
        Py_VISIT(v->program_owner.ptr());
    }
    return 0;
}

int Replay::drop(PyObject* self) {
    Replay* r = nb::inst_ptr<Replay>(self);
    r->clear();
    nb::object gone[] = {std::move(r->miss_), std::move(r->grad_)};
    (void)gone;
    return 0;
}

}  // namespace outlast
