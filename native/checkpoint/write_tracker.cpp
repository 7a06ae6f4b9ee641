#include "write_tracker.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace outlast {

namespace {

// Numbers of include/uapi/linux/{userfaultfd,fs}.h that the build machine's headers may be too old for.
constexpr uint64_t feature_wp_hugetlbfs_shmem = 1u << 12;
constexpr uint64_t feature_wp_unpopulated = 1u << 13;
constexpr uint64_t feature_wp_async = 1u << 15;

struct page_region {
    uint64_t start, end, categories;
};

struct pm_scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask, category_anyof_mask, return_mask;
};

constexpr unsigned long pagemap_scan = _IOWR('f', 16, pm_scan_arg);
constexpr uint64_t page_is_written = 1u << 1;
constexpr uint64_t scan_wp_matching = 1u << 0;
constexpr uint64_t scan_check_wpasync = 1u << 1;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

WriteTracker::WriteTracker(uint64_t base, uint64_t bytes) : base_(base), bytes_(bytes) {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (base % page != 0 || bytes % page != 0 || bytes == 0) throw std::invalid_argument("the region must be whole pages");
    try {
        uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
        if (uffd_ < 0) fail("userfaultfd");
        uffdio_api api{};
        api.api = UFFD_API;
        api.features = feature_wp_async | feature_wp_unpopulated | feature_wp_hugetlbfs_shmem;
        if (ioctl(uffd_, UFFDIO_API, &api) != 0) fail("userfaultfd without asynchronous write protection (Linux 6.7)");
        uffdio_register reg{};
        reg.range.start = base;
        reg.range.len = bytes;
        reg.mode = UFFDIO_REGISTER_MODE_WP;
        if (ioctl(uffd_, UFFDIO_REGISTER, &reg) != 0) fail("register the region with userfaultfd");
        uffdio_writeprotect wp{};
        wp.range = reg.range;
        wp.mode = UFFDIO_WRITEPROTECT_MODE_WP;
        if (ioctl(uffd_, UFFDIO_WRITEPROTECT, &wp) != 0) fail("write-protect the region");
        pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
        if (pagemap_ < 0) fail("open /proc/self/pagemap");
    } catch (...) {
        if (uffd_ >= 0) close(uffd_);
        throw;
    }
}

WriteTracker::~WriteTracker() {
    close(pagemap_);
    close(uffd_);  // closing unregisters and lifts the protection
}

std::vector<std::pair<uint64_t, uint64_t>> WriteTracker::collect() {
    std::vector<std::pair<uint64_t, uint64_t>> out;
    std::vector<page_region> regions(1024);
    uint64_t at = base_;
    const uint64_t end = base_ + bytes_;
    while (at < end) {
        pm_scan_arg arg{};
        arg.size = sizeof arg;
        arg.flags = scan_wp_matching | scan_check_wpasync;
        arg.start = at;
        arg.end = end;
        arg.vec = reinterpret_cast<uint64_t>(regions.data());
        arg.vec_len = regions.size();
        arg.category_mask = page_is_written;
        arg.return_mask = page_is_written;
        const long n = ioctl(pagemap_, pagemap_scan, &arg);
        if (n < 0) {
            if (errno == EINTR) continue;
            fail("PAGEMAP_SCAN");
        }
        for (long i = 0; i < n; ++i) {
            const uint64_t offset = regions[static_cast<size_t>(i)].start - base_, length = regions[static_cast<size_t>(i)].end - regions[static_cast<size_t>(i)].start;
            if (!out.empty() && out.back().first + out.back().second == offset) out.back().second += length;
            else out.emplace_back(offset, length);
        }
        if (arg.walk_end <= at) break;
        at = arg.walk_end;
    }
    return out;
}

std::string write_tracker_trouble() {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* p = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return "no memory";
    std::string trouble;
    try {
        WriteTracker t(reinterpret_cast<uint64_t>(p), 2 * page);
        static_cast<volatile char*>(p)[page] = 1;
        const auto runs = t.collect();
        if (runs.size() != 1 || runs[0].first != page || runs[0].second != page) trouble = "the kernel reported other pages than the written one";
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    munmap(p, 2 * page);
    return trouble;
}

}  // namespace outlast
