// Python surface of the decoder; see src/outlast/engines/native/_native.pyi for the contract of each function.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "philox.h"
#include "repack.h"
#include "rope.h"

namespace nb = nanobind;
using namespace outlast::engine;

namespace {

// Address and length of any contiguous buffer; the caller keeps the object alive.
class View {
  public:
    View(nb::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
            throw nb::python_error();
    }
    ~View() { PyBuffer_Release(&view_); }
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    uint8_t *data() const { return static_cast<uint8_t *>(view_.buf); }
    size_t size() const { return size_t(view_.len); }

  private:
    Py_buffer view_{};
};

Type type_of(uint32_t type) {
    if (!known_type(type)) throw std::invalid_argument("unsupported tensor type " + std::to_string(type));
    return Type(type);
}

Compute compute_of(const std::string &name) {
    for (const auto &[known, mode] : {std::pair{"f32", Compute::f32}, {"int8", Compute::int8}, {"int8x2", Compute::int8x2}})
        if (name == known) return mode;
    throw std::invalid_argument("no way to compute is called " + name + ": f32, int8x2 or int8");
}

const Kernels &kernels_of(const std::string &isa) {
    const Kernels *chosen = isa.empty() ? &kernels() : kernels_by_name(isa.c_str());
    if (chosen == nullptr) throw std::invalid_argument("this CPU or build does not run " + isa);
    return *chosen;
}

void repack_into(nb::handle source, size_t source_offset, uint32_t type, uint32_t rows, uint32_t columns,
                 nb::handle target, size_t target_offset) {
    const View from(source, false), to(target, true);
    const Type t = type_of(type);
    const size_t row = source_row_bytes(t, columns);
    if (rows == 0 || row == 0) throw std::invalid_argument("a matrix needs rows and whole blocks of columns");
    const size_t read = row * rows, write = group_bytes(t, columns) * groups_of(rows);
    if (source_offset > from.size() || read > from.size() - source_offset || target_offset > to.size() ||
        write > to.size() - target_offset)
        throw std::invalid_argument("a matrix lies outside its buffer");
    nb::gil_scoped_release release;
    repack(t, from.data() + source_offset, rows, columns, to.data() + target_offset, 0, groups_of(rows));
}

void publish_word(nb::handle target, size_t offset, uint64_t value) {
    const View to(target, true);
    if (offset % 8 || offset > to.size() || to.size() - offset < 8) throw std::invalid_argument("offset outside the buffer");
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t *>(to.data() + offset)).store(value, std::memory_order_release);
}

uint64_t read_word(nb::handle source, size_t offset) {
    const View from(source, false);
    if (offset % 8 || offset > from.size() || from.size() - offset < 8)
        throw std::invalid_argument("offset outside the buffer");
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t *>(from.data() + offset)).load(std::memory_order_acquire);
}

std::vector<float> row_of(nb::handle weights, size_t offset, uint32_t type, uint32_t rows, uint32_t columns, uint32_t row) {
    const View from(weights, false);
    const Type t = type_of(type);
    const size_t stride = group_bytes(t, columns);
    if (row >= rows || offset > from.size() || stride * groups_of(rows) > from.size() - offset)
        throw std::invalid_argument("a row lies outside its buffer");
    std::vector<float> out(columns);
    read_row({from.data() + offset, t, rows, columns, stride}, row, out.data());
    return out;
}

// Rows of floats times a repacked matrix, for the tests: [tokens][columns] -> [tokens][rows].
nb::bytes multiply(nb::handle weights, size_t offset, uint32_t type, uint32_t rows, uint32_t columns, nb::bytes x,
                   const std::string &compute, const std::string &isa) {
    const View from(weights, false);
    const Type t = type_of(type);
    const size_t stride = group_bytes(t, columns), row = size_t{columns} * sizeof(float);
    if (columns == 0 || columns % columns_of(t) || x.size() % row || offset > from.size() ||
        stride * groups_of(rows) > from.size() - offset)
        throw std::invalid_argument("the matrix lies outside its buffer, or the rows do not fit it");
    const uint32_t tokens = uint32_t(x.size() / row);
    const Kernels &k = kernels_of(isa);
    const Compute mode = compute_of(compute);
    Rows in;
    in.reserve(tokens, columns, mode);
    for (uint32_t i = 0; i < tokens; ++i) {
        std::memcpy(in.row(i), x.c_str() + i * row, row);
        in.prepare(k, i, 0, columns);
    }
    const uint32_t wide = padded(rows);
    std::vector<float> y(size_t{tokens} * wide);
    k.matmul(mode, {from.data() + offset, t, rows, columns, stride}, 0, groups_of(rows), in.all(), tokens, y.data(), wide,
             false);
    std::vector<float> out;
    for (uint32_t i = 0; i < tokens; ++i) out.insert(out.end(), y.begin() + i * wide, y.begin() + i * wide + rows);
    return nb::bytes(reinterpret_cast<const char *>(out.data()), out.size() * sizeof(float));
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compute half of the native engine: repacked weights, decoder, sampler.";

    nb::class_<Config>(m, "Config")
        .def("__init__",
             [](Config *self, uint32_t layers, uint32_t hidden, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
                uint32_t ffn, uint32_t vocab, uint32_t context, float epsilon, double rope_base, uint32_t window,
                uint32_t rope_scaling, double rope_factor, double rope_original_context, double rope_beta_fast,
                double rope_beta_slow) {
                 new (self) Config{layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context, epsilon, rope_base,
                                   window, {rope_scaling, rope_factor, rope_original_context, rope_beta_fast,
                                            rope_beta_slow}};
             },
             nb::kw_only(), nb::arg("layers"), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("ffn"), nb::arg("vocab"), nb::arg("context"), nb::arg("epsilon"),
             nb::arg("rope_base"), nb::arg("window") = 0, nb::arg("rope_scaling") = uint32_t{RopeScaling::none},
             nb::arg("rope_factor") = 1.0, nb::arg("rope_original_context") = 0.0, nb::arg("rope_beta_fast") = 32.0,
             nb::arg("rope_beta_slow") = 1.0)
        .def_ro("layers", &Config::layers)
        .def_ro("hidden", &Config::hidden)
        .def_ro("heads", &Config::heads)
        .def_ro("kv_heads", &Config::kv_heads)
        .def_ro("head_dim", &Config::head_dim)
        .def_ro("ffn", &Config::ffn)
        .def_ro("vocab", &Config::vocab)
        .def_ro("context", &Config::context)
        .def_ro("epsilon", &Config::epsilon)
        .def_ro("rope_base", &Config::rope_base);

    nb::class_<ol_kv_geometry>(m, "KvGeometry")
        .def("__init__",
             [](ol_kv_geometry *self, uint32_t pieces, uint32_t block_tokens, uint32_t row_bytes, uint32_t blocks,
                uint64_t piece_stride, uint64_t block_bytes) {
                 new (self) ol_kv_geometry{pieces, block_tokens, row_bytes, blocks, piece_stride, block_bytes};
             },
             nb::kw_only(), nb::arg("pieces"), nb::arg("block_tokens"), nb::arg("row_bytes"), nb::arg("blocks"),
             nb::arg("piece_stride"), nb::arg("block_bytes"))
        .def_ro("pieces", &ol_kv_geometry::pieces)
        .def_ro("block_tokens", &ol_kv_geometry::block_tokens)
        .def_ro("row_bytes", &ol_kv_geometry::row_bytes)
        .def_ro("blocks", &ol_kv_geometry::blocks)
        .def_ro("piece_stride", &ol_kv_geometry::piece_stride)
        .def_ro("block_bytes", &ol_kv_geometry::block_bytes);
    m.def("kv_geometry", &kv_geometry, nb::arg("config"), nb::arg("block_tokens"), nb::arg("blocks"));

    nb::class_<SamplerParams>(m, "SamplerParams")
        .def("__init__",
             [](SamplerParams *self, float temperature, float top_p, uint32_t top_k, float min_p, uint64_t seed,
                uint32_t stream, float presence, float frequency, float repetition,
                std::vector<std::pair<uint32_t, float>> bias, uint32_t top_logprobs, float typical_p, uint32_t min_tokens,
                std::vector<uint32_t> stop_tokens) {
                 new (self) SamplerParams{temperature, top_p,      min_p,           top_k,        seed,      stream,    presence,
                                          frequency,   repetition, std::move(bias), top_logprobs, typical_p, min_tokens,
                                          std::move(stop_tokens)};
             },
             nb::kw_only(), nb::arg("temperature") = 1.0f, nb::arg("top_p") = 1.0f, nb::arg("top_k") = 0,
             nb::arg("min_p") = 0.0f, nb::arg("seed") = 0, nb::arg("stream") = 0, nb::arg("presence_penalty") = 0.0f,
             nb::arg("frequency_penalty") = 0.0f, nb::arg("repetition_penalty") = 1.0f,
             nb::arg("logit_bias") = std::vector<std::pair<uint32_t, float>>(), nb::arg("top_logprobs") = 0,
             nb::arg("typical_p") = 1.0f, nb::arg("min_tokens") = 0, nb::arg("stop_tokens") = std::vector<uint32_t>());

    nb::class_<Result>(m, "Result")
        .def_ro("handle", &Result::handle)
        .def_prop_ro("token", [](const Result &r) -> nb::object { return r.sampled ? nb::cast(r.token) : nb::none(); })
        .def_ro("logprob", &Result::logprob)
        .def_ro("top", &Result::top)
        .def_ro("verified", &Result::verified)
        .def_ro("finite", &Result::finite)
        .def_prop_ro("more", [](const Result &r) {
            nb::list out;
            for (const Sampled &s : r.more) out.append(nb::make_tuple(s.token, s.logprob, s.top));
            return out;
        });

    using Item = std::tuple<uint32_t, uint32_t, uint32_t, std::vector<uint32_t>>;
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__",
             [](Decoder *self, const Config &config,
                const std::vector<std::tuple<std::string, uint32_t, uint32_t, uint32_t, uint64_t>> &tensors,
                uint64_t weights, uint64_t weights_bytes, uint64_t pool, const ol_kv_geometry &geometry,
                const std::string &isa, const std::string &compute) {
                 std::vector<TensorPlace> places;
                 for (const auto &[name, type, rows, columns, offset] : tensors)
                     places.push_back({name, type, rows, columns, offset});
                 new (self) Decoder(config, places, weights, weights_bytes, pool, geometry, kernels_of(isa),
                                    compute_of(compute));
             },
             nb::arg("config"), nb::arg("tensors"), nb::arg("weights"), nb::arg("weights_bytes"), nb::arg("pool"),
             nb::arg("geometry"), nb::arg("isa") = "", nb::arg("compute") = "int8x2")
        .def("bind", &Decoder::bind, nb::arg("slots"))
        .def("add", &Decoder::add, nb::arg("key"), nb::arg("generation"), nb::arg("tokens"), nb::arg("prompt_length"),
             nb::arg("computed"), nb::arg("params"))
        .def("set_table", &Decoder::set_table, nb::arg("handle"), nb::arg("blocks"))
        .def("remove", &Decoder::remove, nb::arg("handle"))
        .def("rewind", &Decoder::rewind, nb::arg("handle"), nb::arg("computed"))
        .def("computed", [](const Decoder &d, uint32_t handle) { return d.sequence(handle).computed; }, nb::arg("handle"))
        .def("tokens", [](const Decoder &d, uint32_t handle) { return d.sequence(handle).tokens; }, nb::arg("handle"))
        .def("length", [](const Decoder &d, uint32_t handle) { return d.sequence(handle).tokens.size(); },
             nb::arg("handle"))
        .def("plan",
             [](Decoder &d, const std::vector<Item> &batch, uint32_t parts) {
                 std::vector<BatchItem> items;
                 for (const auto &[handle, positions, recheck, drafts] : batch)
                     items.push_back({handle, positions, recheck, drafts});
                 d.plan(items, parts);
             },
             nb::arg("batch"), nb::arg("parts"))
        .def_prop_ro("tasks_address", [](const Decoder &d) { return reinterpret_cast<uint64_t>(d.tasks().data()); })
        .def_prop_ro("tasks_count", [](const Decoder &d) { return d.tasks().size(); })
        .def_prop_ro("plan_number", &Decoder::plan_number)
        .def_prop_ro("plans_built", &Decoder::plans_built)
        .def_prop_ro("writes_address", [](const Decoder &d) { return reinterpret_cast<uint64_t>(d.writes().data()); })
        .def_prop_ro("writes_count", [](const Decoder &d) { return d.writes().size(); })
        .def_prop_ro("planned", &Decoder::planned)
        .def("run", &Decoder::run, nb::arg("threads") = 1, nb::call_guard<nb::gil_scoped_release>())
        .def("commit", &Decoder::commit)
        .def("abandon", &Decoder::abandon)
        .def("accepted", &Decoder::accepted)
        .def("logits",
             [](const Decoder &d) {
                 nb::list rows;
                 for (const std::vector<float> &row : d.logits())
                     rows.append(nb::bytes(reinterpret_cast<const char *>(row.data()), row.size() * sizeof(float)));
                 return rows;
             });

    m.def("operators", [] {
        std::map<std::string, uint64_t> all;
        for (const OperatorEntry &o : kOperatorTable) all[o.name] = reinterpret_cast<uint64_t>(o.function);
        return all;
    });
    m.def("isa", [] { return std::string(kernels().name); });
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const char *name : {"generic", "avx2", "avx512", "avx512vnni"})
            if (kernels_by_name(name) != nullptr) names.emplace_back(name);
        return names;
    });

    m.def("matrix_bytes", [](uint32_t type, uint32_t rows, uint32_t columns) {
        return group_bytes(type_of(type), columns) * groups_of(rows);
    }, nb::arg("kind"), nb::arg("rows"), nb::arg("columns"));
    m.def("repack", &repack_into, nb::arg("source"), nb::arg("source_offset"), nb::arg("kind"), nb::arg("rows"),
          nb::arg("columns"), nb::arg("target"), nb::arg("target_offset"));
    m.def("publish_word", &publish_word, nb::arg("target"), nb::arg("offset"), nb::arg("value"));
    m.def("read_word", &read_word, nb::arg("source"), nb::arg("offset"));
    m.def("read_row", &row_of, nb::arg("weights"), nb::arg("offset"), nb::arg("kind"), nb::arg("rows"),
          nb::arg("columns"), nb::arg("row"));
    m.def("multiply", &multiply, nb::arg("weights"), nb::arg("offset"), nb::arg("kind"), nb::arg("rows"),
          nb::arg("columns"), nb::arg("x"), nb::arg("compute"), nb::arg("isa") = "");
    m.def("address", [](nb::handle buffer) { return reinterpret_cast<uint64_t>(View(buffer, false).data()); },
          nb::arg("buffer"));

    m.def("philox", [](std::vector<uint32_t> counter, std::vector<uint32_t> key) {
        if (counter.size() != 4 || key.size() != 2) throw std::invalid_argument("four counter words and two key words");
        const auto r = philox4x32({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
        return std::vector<uint32_t>(r.begin(), r.end());
    }, nb::arg("counter"), nb::arg("key"));
    m.def("uniform", &uniform, nb::arg("seed"), nb::arg("stream"), nb::arg("position"));
    m.def("rope_angles", [](const Config &c, uint32_t position, const std::vector<float> &factors) {
        if (!factors.empty() && factors.size() != c.head_dim / 2) throw std::invalid_argument("one factor per pair");
        std::vector<float> out(c.head_dim);
        rope_angles(make_rope(c.rope_base, c.head_dim, c.scaling, factors.empty() ? nullptr : factors.data()), position,
                    out.data());
        return out;
    }, nb::arg("config"), nb::arg("position"), nb::arg("factors") = std::vector<float>());
    m.def("sample", [](nb::bytes logits, const SamplerParams &params, const std::vector<std::pair<uint32_t, uint32_t>> &counts,
                       uint32_t position, uint32_t generated) {
        const uint32_t vocab = uint32_t(logits.size() / sizeof(float));
        if (vocab == 0) throw std::invalid_argument("no logits");
        std::vector<float> row(padded(vocab));
        std::memcpy(row.data(), logits.c_str(), size_t{vocab} * sizeof(float));
        SamplerScratch scratch(vocab);
        ol_emission out{};
        Result r{0, false, 0, 0.0f, {}, true, true, {}};
        r.finite = r.sampled = sample(kernels(), row.data(), vocab, params, TokenCounts(counts.begin(), counts.end()),
                                      position, generated, scratch, &out);
        r.token = out.token;
        r.logprob = out.logprob;
        for (uint32_t i = 0; i < out.tops; ++i) r.top.emplace_back(out.top[i].token, out.top[i].logprob);
        return r;
    }, nb::arg("logits"), nb::arg("params"), nb::arg("counts"), nb::arg("position"), nb::arg("generated") = 0);
}
