#include "page_hash.hpp"

#include <stdexcept>

namespace outlast {

namespace {

constexpr size_t page_bytes = 4096;

}  // namespace

ol_digest hash_page(const uint32_t* key, const void* page) {
    ol_digest d;
    ol_nh(key, page, page_bytes, &d);
    return d;
}

PageHashes::PageHashes(uint64_t base, uint64_t bytes, uint64_t seed)
    : base_(reinterpret_cast<const uint8_t*>(base)), key_(OL_NH_KEY_WORDS), table_(bytes / page_bytes), known_(bytes / page_bytes, false) {
    if (bytes % page_bytes != 0) throw std::invalid_argument("the region must be a whole number of 4096-byte pages");
    ol_nh_key(seed, key_.data());
}

size_t PageHashes::scan(uint64_t from, size_t limit, uint8_t* out, std::vector<uint64_t>& found, uint64_t& next) {
    alignas(64) uint8_t copy[page_bytes];
    found.clear();
    uint64_t page = from;
    for (; page < table_.size() && found.size() < limit; ++page) {
        std::memcpy(copy, base_ + page * page_bytes, page_bytes);
        ol_digest d;
        ol_nh(key_.data(), copy, page_bytes, &d);
        if (known_[page] && d == table_[page]) continue;
        std::memcpy(out + found.size() * page_bytes, copy, page_bytes);
        table_[page] = d;
        known_[page] = true;
        found.push_back(page);
    }
    next = page;
    return found.size();
}

void PageHashes::reset() { known_.assign(known_.size(), false); }

}  // namespace outlast
