// Calls of captured functions from Python: look at the tensors, find the plan for them, patch addresses, run once.
#pragma once
#include "program.hpp"

#include <nanobind/nanobind.h>

#include <vector>

namespace outlast {

// What a tensor argument must look like.
struct TensorKey {
    uint16_t dtype;  // DLPack's code << 8 | bits
    std::vector<int64_t> shape, strides;

    // Whether the imaginary part of a conjugated complex tensor can look like this: every step is over a pair.  Such a
    // tensor is negated lazily, by a bit that the view of its memory does not show.
    bool maybe_negated() const {
        if (dtype >> 8 != 2) return false;
        for (size_t i = 0; i < shape.size(); ++i)
            if (shape[i] > 1 && strides[i] % 2 != 0) return false;
        return true;
    }
};

// One specialisation: a plan for one combination of shapes, strides, dtypes and identities of the arguments.
struct Variant {
    std::vector<TensorKey> inputs;
    std::vector<uint32_t> same_as;        // argument i is the same tensor as argument same_as[i] (itself if it is the first)
    bool alias_sensitive = false;         // it changes memory that it was given: no two arguments or constants may share any
    std::vector<uint32_t> maybe_negated;  // arguments that are asked whether they are
    std::vector<nanobind::object> constants;
    std::vector<TensorKey> constant_keys;
    std::vector<uint64_t> constant_addresses;  // as of this call, under the interpreter's lock
    std::vector<TensorKey> outputs;       // made anew for each call, contiguous
    char form = 's';                      // what a call returns: 's' the one output, 't' a tuple, 'l' a list, 'f' what `finish` makes
    nanobind::object finish;              // form 'f': called with (arguments, outputs)
    nanobind::object python;              // not none: runs the call instead (plans that PyTorch takes part in)
    Program* program = nullptr;
    nanobind::object program_owner;
    uint64_t calls = 0;
    uint64_t used = 0;
};

// Called before a replay looks at tensors, while some may have no content yet (outlast.executor.interception); None = no one.
void set_flush(nanobind::object hook);
// Called first: while a function is recorded, a call of a replay inside it has to show its operators.  What it returns,
// unless None, is called with (replay, arguments) in place of the plan (outlast.executor.trace); None = no one.
void set_recording(nanobind::object hook);

class Replay {
  public:
    // `types`: the exact tensor types that are taken; `exchange`: address of the framework's DLPack exchange table;
    // `miss(arguments)` is called for arguments no variant fits, `grad(arguments)` when autograd would have to record.
    Replay(nanobind::object types, uint64_t exchange, nanobind::object grad_enabled, nanobind::object miss, nanobind::object grad,
           double timeout_s);
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

    nanobind::object call(nanobind::tuple arguments);
    // Adds a variant, the newest first; drops the one unused for longest beyond `most`.
    void add(Variant&& variant, size_t most);
    void clear();
    size_t size() const { return variants_.size(); }
    uint64_t calls() const;
    uint64_t misses() const { return misses_; }

    static int traverse(PyObject* self, visitproc visit, void* arg);
    static int drop(PyObject* self);

  private:
    nanobind::object run(Variant& v, const nanobind::tuple& arguments, const uint64_t* addresses);

    nanobind::object types_, grad_enabled_, miss_, grad_;
    PyTypeObject* type_[2] = {nullptr, nullptr};
    const void* exchange_;
    double timeout_s_;
    std::vector<std::shared_ptr<Variant>> variants_;
    std::vector<uint64_t> hashes_;  // of the variants' inputs, side by side: a look through them touches a few lines
    std::shared_ptr<Variant> last_;
    uint64_t clock_ = 0, misses_ = 0, dropped_calls_ = 0;
};

}  // namespace outlast
