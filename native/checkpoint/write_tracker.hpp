// Exact write tracking of a memory range by userfaultfd: asynchronous write protection (Linux 6.7) with PAGEMAP_SCAN.
// Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst of the kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace outlast {

class WriteTracker {
  public:
    // Throws std::system_error where the kernel or the privileges do not allow it.
    WriteTracker(uint64_t base, uint64_t bytes);
    ~WriteTracker();
    WriteTracker(const WriteTracker&) = delete;
    WriteTracker& operator=(const WriteTracker&) = delete;

    // Runs (offset, length in bytes) written since the last call, in order; they are write-protected again by the
    // same call, so a write that comes later is seen next time.
    std::vector<std::pair<uint64_t, uint64_t>> collect();

  private:
    uint64_t base_, bytes_;
    int uffd_ = -1, pagemap_ = -1;
};

// "" where WriteTracker works, else why not.  Tries it on one page.
std::string write_tracker_trouble();

}  // namespace outlast
