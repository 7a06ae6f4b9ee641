#include "outputs.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>

namespace outlast {

namespace {

constexpr size_t line = 64, most_dims = 8;  // OL_MAX_DIMS
constexpr size_t largest_kept = 64 * 1024;  // beyond that filling the memory costs more than getting it
constexpr size_t kept_per_size = 64;        // calls whose results live at the same time, before the allocator is asked
constexpr size_t sizes = 11;                // powers of two, from one line to largest_kept
static_assert(line << (sizes - 1) == largest_kept);

struct Block {
    dlpack::Managed managed;
    int64_t shape[most_dims], strides[most_dims];
    uint32_t size_class;
    Block* next;
};
constexpr size_t header = (sizeof(Block) + line - 1) / line * line;

struct Kept {
    std::mutex lock;
    Block* first = nullptr;
    size_t count = 0;
};
// Never destroyed: tensors may outlive every static object of the process.
std::array<Kept, sizes>& kept() {
    static auto* all = new std::array<Kept, sizes>;
    return *all;
}
std::atomic<uint64_t> kept_bytes{0};

size_t bytes_of(uint32_t size_class) { return line << size_class; }

void give_back(dlpack::Managed* managed) {
    auto* block = static_cast<Block*>(managed->manager);
    if (block->size_class < sizes) {
        Kept& k = kept()[block->size_class];
        const std::lock_guard guard(k.lock);
        if (k.count < kept_per_size) {
            block->next = k.first;
            k.first = block;
            ++k.count;
            kept_bytes.fetch_add(bytes_of(block->size_class), std::memory_order_relaxed);
            return;
        }
    }
    std::free(block);
}

Block* take(size_t bytes) {
    uint32_t size_class = 0;
    while (size_class < sizes && bytes_of(size_class) < bytes) ++size_class;
    const bool keep = bytes <= largest_kept;
    if (keep) {
        Kept& k = kept()[size_class];
        const std::lock_guard guard(k.lock);
        if (Block* block = k.first) {
            k.first = block->next;
            --k.count;
            kept_bytes.fetch_sub(bytes_of(size_class), std::memory_order_relaxed);
            return block;
        }
    }
    const size_t room = keep ? bytes_of(size_class) : (bytes + line - 1) / line * line;
    void* memory = std::aligned_alloc(line, header + room);
    if (memory == nullptr) throw std::bad_alloc();
    auto* block = new (memory) Block{};
    block->size_class = keep ? size_class : static_cast<uint32_t>(sizes);
    return block;
}

}  // namespace

dlpack::Managed* new_output(uint16_t dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    if (shape.size() > most_dims) throw std::invalid_argument("too many dimensions");
    size_t bytes = (dtype & 0xff) / 8;
    for (const int64_t n : shape) bytes *= static_cast<size_t>(n);
    Block* block = take(bytes == 0 ? 1 : bytes);
    for (size_t i = 0; i < shape.size(); ++i) {
        block->shape[i] = shape[i];
        block->strides[i] = strides[i];
    }
    block->managed = {{1, 0}, block, &give_back, 0, {}};
    dlpack::Tensor& t = block->managed.tensor;
    t.data = reinterpret_cast<char*>(block) + header;
    t.device = {dlpack::cpu, 0};
    t.ndim = static_cast<int32_t>(shape.size());
    t.dtype = {static_cast<uint8_t>(dtype >> 8), static_cast<uint8_t>(dtype & 0xff), 1};
    t.shape = block->shape;
    t.strides = block->strides;
    return &block->managed;
}

uint64_t kept_output_bytes() { return kept_bytes.load(std::memory_order_relaxed); }

}  // namespace outlast
