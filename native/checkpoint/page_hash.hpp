// Change detection by a hash per page (no second copy of the region).
#pragma once
#include "outlast/hash.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace outlast {

class PageHashes {
  public:
    // `bytes` is a multiple of 4096; `seed` makes the key, a fresh random number per process.
    PageHashes(uint64_t base, uint64_t bytes, uint64_t seed);
    // Pages that differ from what was last accepted.  Each page is copied once into a small buffer, the copy is hashed
    // and, when it differs, handed out: out[i] is the content that was hashed, not what the region holds by then.
    // At most `limit` pages (out holds limit * 4096 bytes); `next` = page to go on with, pages() when finished.
    size_t scan(uint64_t from, size_t limit, uint8_t* out, std::vector<uint64_t>& found, uint64_t& next);
    uint64_t pages() const { return table_.size(); }
    // Forget what is known of all pages: the next scan hands out every one.
    void reset();

  private:
    const uint8_t* base_;
    std::vector<uint32_t> key_;
    std::vector<ol_digest> table_;
    std::vector<bool> known_;
};

ol_digest hash_page(const uint32_t* key, const void* page);

}  // namespace outlast
