#include "log.hpp"

#include "crc32c.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace outlast {

namespace {

constexpr uint64_t padded(uint64_t n) { return (n + OL_RECORD_ALIGN - 1) & ~uint64_t{OL_RECORD_ALIGN - 1}; }

template <class T> uint32_t struct_crc(const T& s) {
    T copy = s;
    copy.header_crc = 0;
    return crc32c(0, &copy, sizeof copy);
}

[[noreturn]] void fail(LogError::Kind kind, const std::string& text) { throw LogError(kind, text); }

std::string system_text(const std::string& what) { return what + ": " + std::strerror(errno); }

template <class T> bool all_zero(const T& s) {
    static const T zero{};
    return std::memcmp(&s, &zero, sizeof s) == 0;
}

bool valid_superblock(const ol_superblock& s, const uint8_t* uuid, uint64_t bytes) {
    return std::memcmp(s.magic, OL_SEGMENT_MAGIC, 8) == 0 && s.version == OL_LOG_VERSION && s.header_crc == struct_crc(s) &&
           std::memcmp(s.uuid, uuid, 16) == 0 && s.bytes == bytes;
}

// ol_log_control.oldest: number and check in one word.
uint64_t marked(uint64_t number) { return number | uint64_t{crc32c(0, &number, sizeof number) & 0xffffff} << OL_SEGMENT_BITS; }

constexpr uint64_t number_mask = (uint64_t{1} << OL_SEGMENT_BITS) - 1;

uint64_t oldest_of(const ol_log_control* control) {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(control->oldest)).load(std::memory_order_acquire);
}

// ---- fault injection -------------------------------------------------------------------------------------------

constexpr const char* point_names[] = {"begin",         "begin.written", "append.payload", "append.header",  "commit",
                                       "commit.payload", "commit.header", "segment.end",   "segment.create", "release",
                                       "open.cut",       "recover.scanned", "recover.applied"};
std::atomic<int> armed_point{-1};
std::atomic<uint32_t> armed_countdown{0};

// ---- segments in memory ----------------------------------------------------------------------------------------

class ArenaStore final : public SegmentStore {
  public:
    ArenaStore(uint8_t* base, uint64_t bytes) {
        if (bytes < OL_CONTROL_BYTES) fail(LogError::Kind::corrupt, "log memory is smaller than its control page");
        control_ = reinterpret_cast<ol_log_control*>(base);
        segment_bytes_ = control_->segment_bytes;
        const uint64_t places = control_->segments;
        if (std::memcmp(control_->magic, OL_CONTROL_MAGIC, 8) != 0 || control_->version != OL_LOG_VERSION)
            fail(LogError::Kind::corrupt, "log memory has no valid control page");
        if (segment_bytes_ < 2 * OL_SUPERBLOCK_BYTES || segment_bytes_ % 4096 != 0 || places == 0 ||
            places > (bytes - OL_CONTROL_BYTES) / segment_bytes_)
            fail(LogError::Kind::corrupt, "log control page: segments do not fit the memory");
        for (uint64_t i = 0; i < places; ++i) place_.push_back({base + OL_CONTROL_BYTES + i * segment_bytes_, 0});
    }

    uint64_t segment_bytes() const override { return segment_bytes_; }

    std::map<uint64_t, uint8_t*> existing() override {
        std::map<uint64_t, uint8_t*> found;
        for (auto& p : place_) {
            p.number = 0;
            ol_superblock s;
            std::memcpy(&s, p.address, sizeof s);
            if (!valid_superblock(s, control_->uuid, segment_bytes_) || s.segment == 0) continue;
            if (found.emplace(s.segment, p.address).second) p.number = s.segment;
        }
        return found;
    }

    uint8_t* create(uint64_t number) override {
        for (auto& p : place_) {
            if (p.number != 0) continue;
            p.number = number;
            std::memset(p.address, 0, OL_SUPERBLOCK_BYTES + sizeof(ol_record));
            return p.address;
        }
        fail(LogError::Kind::refused, "the log is full: all segments hold live state (raise the log capacity)");
    }

    void release(uint64_t number) override {
        for (auto& p : place_) {
            if (p.number != number) continue;
            std::memset(p.address, 0, sizeof(ol_superblock));
            p.number = 0;
        }
    }

    void flush(uint64_t, size_t, size_t) override {}  // memory of another process survives ours as it is

    uint64_t places_left() const override {
        uint64_t n = 0;
        for (const auto& p : place_) n += p.number == 0;
        return n;
    }

  private:
    struct Place {
        uint8_t* address;
        uint64_t number;
    };
    ol_log_control* control_;
    uint64_t segment_bytes_;
    std::vector<Place> place_;
};

// ---- segments in files -----------------------------------------------------------------------------------------

class FileStore final : public SegmentStore {
  public:
    FileStore(const std::string& directory, uint64_t segment_bytes, uint64_t max_segments, bool writable, bool durable)
        : directory_(directory), segment_bytes_(segment_bytes), max_segments_(max_segments), writable_(writable), durable_(durable) {
        if (segment_bytes < 2 * OL_SUPERBLOCK_BYTES || segment_bytes % 4096 != 0)
            fail(LogError::Kind::corrupt, "segment size must be a multiple of 4096 and at least two pages");
        dir_ = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir_ < 0) fail(LogError::Kind::durability, system_text("open " + directory));
    }

    ~FileStore() override {
        for (auto& [number, s] : open_) unmap(s);
        close(dir_);
    }

    uint64_t segment_bytes() const override { return segment_bytes_; }

    std::map<uint64_t, uint8_t*> existing() override {
        std::map<uint64_t, uint8_t*> found;
        const int copy = dup(dir_);
        DIR* d = fdopendir(copy);
        if (d == nullptr) {
            close(copy);
            fail(LogError::Kind::durability, system_text("list " + directory_));
        }
        rewinddir(d);
        while (const dirent* e = readdir(d)) {
            unsigned long long number = 0;
            char rest = 0;
            if (std::sscanf(e->d_name, "segment-%16llx.ologs%c", &number, &rest) != 1 || number == 0 || number > last_number) continue;
            if (name_of(number) != e->d_name) continue;
            auto at = open_.find(number);
            if (at == open_.end()) {
                const int fd = openat(dir_, e->d_name, (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
                struct stat st{};
                if (fd < 0) continue;
                if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || static_cast<uint64_t>(st.st_size) < segment_bytes_) {
                    close(fd);  // to the reader it is missing
                    continue;
                }
                at = open_.emplace(number, map(fd)).first;
            }
            found.emplace(number, at->second.address);
        }
        closedir(d);
        return found;
    }

    uint8_t* create(uint64_t number) override {
        if (open_.size() >= max_segments_)
            fail(LogError::Kind::refused, "the log is full: all segments hold live state (raise the log capacity)");
        const std::string name = name_of(number);
        const int fd = openat(dir_, name.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0) fail(LogError::Kind::durability, system_text("create " + name));
        if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(segment_bytes_))) {
            close(fd);
            unlinkat(dir_, name.c_str(), 0);
            errno = error;
            fail(LogError::Kind::durability, system_text("allocate " + name));
        }
        const Mapped m = map(fd);
        if (durable_ && (fsync(fd) != 0 || fsync(dir_) != 0)) {
            const std::string text = system_text("flush " + name);
            unmap(m);
            unlinkat(dir_, name.c_str(), 0);
            fail(LogError::Kind::durability, text);
        }
        open_.emplace(number, m);
        return m.address;
    }

    void release(uint64_t number) override {
        const auto at = open_.find(number);
        unlinkat(dir_, name_of(number).c_str(), 0);
        if (at == open_.end()) return;
        unmap(at->second);
        open_.erase(at);
    }

    void flush(uint64_t number, size_t from, size_t to) override {
        if (!durable_ || to <= from) return;
        const auto at = open_.find(number);
        if (at == open_.end()) return;
        const size_t start = from & ~size_t{4095};
        if (msync(at->second.address + start, to - start, MS_SYNC) != 0)  // = fdatasync of the range
            fail(LogError::Kind::durability, system_text("flush " + name_of(number)));
    }

    uint64_t places_left() const override { return max_segments_ > open_.size() ? max_segments_ - open_.size() : 0; }

  private:
    // A name with a larger number is not ours: no log gets there, and the next number must exist.
    static constexpr unsigned long long last_number = 1ull << (OL_SEGMENT_BITS - 1);

    struct Mapped {
        int fd;
        uint8_t* address;
    };

    static std::string name_of(uint64_t number) {
        char name[64];
        std::snprintf(name, sizeof name, "segment-%016llx.ologs", static_cast<unsigned long long>(number));
        return name;
    }

    Mapped map(int fd) const {
        void* p = mmap(nullptr, segment_bytes_, writable_ ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) {
            const std::string text = system_text("map a segment");
            close(fd);
            fail(LogError::Kind::durability, text);
        }
        return {fd, static_cast<uint8_t*>(p)};
    }

    void unmap(const Mapped& m) const {
        munmap(m.address, segment_bytes_);
        close(m.fd);
    }

    const std::string directory_;
    const uint64_t segment_bytes_, max_segments_;
    const bool writable_, durable_;
    int dir_ = -1;
    std::map<uint64_t, Mapped> open_;
};

}  // namespace

std::unique_ptr<SegmentStore> arena_store(uint8_t* base, uint64_t bytes) { return std::make_unique<ArenaStore>(base, bytes); }

std::unique_ptr<SegmentStore> file_store(const std::string& directory, uint64_t segment_bytes, uint64_t max_segments, bool writable,
                                         bool durable) {
    return std::make_unique<FileStore>(directory, segment_bytes, max_segments, writable, durable);
}

void arm_kill_point(const std::string& name, uint32_t countdown) {
    if (name.empty()) {
        armed_point.store(-1);
        return;
    }
    for (int i = 0; i < static_cast<int>(std::size(point_names)); ++i) {
        if (name == point_names[i]) {
            armed_countdown.store(countdown == 0 ? 1 : countdown);
            armed_point.store(i);
            return;
        }
    }
    throw std::invalid_argument("no kill point named " + name);
}

std::vector<std::string> kill_points() { return {std::begin(point_names), std::end(point_names)}; }

void reach_kill_point(const char* name) {
    const int armed = armed_point.load(std::memory_order_relaxed);
    if (armed < 0 || std::strcmp(point_names[armed], name) != 0) return;
    if (armed_countdown.fetch_sub(1) == 1) kill(getpid(), SIGKILL);
}

// ---- reading ---------------------------------------------------------------------------------------------------

Scan scan_log(SegmentStore& store, const ol_log_control* control, const uint8_t* manifest) {
    Scan out;
    const uint64_t size = store.segment_bytes();
    const uint64_t word = oldest_of(control), oldest = word & number_mask;
    bool first = true, ended = true;
    uint64_t expected_segment = 0;
    const auto stop = [&](uint64_t segment, uint64_t offset, const std::string& why) {
        out.stop_segment = segment;
        out.stop_offset = offset;
        out.stop = why;
    };
    const auto existing = store.existing();  // also tells the store which places are taken
    if (word != marked(oldest)) {
        stop(0, 0, "the control page does not say which segment is the first");
        return out;
    }
    for (const auto& [number, base] : existing) {
        if (number < oldest) continue;  // its release was interrupted
        ol_superblock s;
        std::memcpy(&s, base, sizeof s);
        if (first && number != oldest) {
            stop(oldest, 0, "segment " + std::to_string(oldest) + ", the first that counts, is missing");
            return out;
        }
        if (!first && !ended) {
            stop(out.end_segment, out.end_offset, "the segment stops without an END record though a later one exists");
            return out;
        }
        if (!first && number != expected_segment) {
            stop(number, 0, "segment " + std::to_string(expected_segment) + " is missing");
            return out;
        }
        if (!first && all_zero(s)) {  // a crash between its creation and its superblock
            out.torn = true;
            stop(number, 0, "a segment was created and not begun");
            return out;
        }
        if (!valid_superblock(s, control->uuid, size) || s.segment != number) {
            stop(number, 0, "superblock is not valid for this log");
            return out;
        }
        if (first) {
            std::memcpy(out.manifest.data(), s.manifest, 32);
            if (s.manifest_bytes <= OL_SUPERBLOCK_BYTES - OL_MANIFEST_OFFSET)
                out.manifest_text.assign(reinterpret_cast<const char*>(base) + OL_MANIFEST_OFFSET, s.manifest_bytes);
            if (manifest != nullptr && std::memcmp(manifest, s.manifest, 32) != 0) {
                out.manifest_differs = true;
                stop(number, 0, "the manifest differs: the log belongs to another model, layout or build");
                return out;
            }
            out.next_sequence = s.sequence;
            out.last_epoch = s.epoch == 0 ? 0 : s.epoch - 1;
        } else if (s.sequence != out.next_sequence || s.epoch <= out.last_epoch ||
                   std::memcmp(s.manifest, out.manifest.data(), 32) != 0) {
            stop(number, 0, "superblock does not continue the segment before");
            return out;
        }
        if (s.writer_epoch < out.max_writer_epoch) {
            stop(number, 0, "superblock of an older writer after a newer one");
            return out;
        }
        if (s.epoch > out.spent_epoch) out.spent_epoch = s.epoch - 1;
        first = false;
        ended = false;
        expected_segment = number + 1;
        out.end_segment = number;
        out.end_offset = OL_SUPERBLOCK_BYTES;
        out.segments.push_back({number, size, OL_SUPERBLOCK_BYTES, s.writer_epoch, s.epoch, 0, 0, 0});
        SegmentReport& report = out.segments.back();

        uint64_t at = OL_SUPERBLOCK_BYTES;
        bool in_epoch = false;
        ol_record begin{};
        uint32_t sequence = out.next_sequence, records = 0, digest = 0;
        uint64_t bytes = 0, writer = s.writer_epoch < out.max_writer_epoch ? out.max_writer_epoch : s.writer_epoch;
        const size_t kept = out.records.size();
        size_t committed = kept;
        std::string why;
        while (true) {
            if (at + sizeof(ol_record) > size) {
                why = in_epoch ? "an epoch runs past the end of the segment" : "";
                break;
            }
            ol_record r;
            std::memcpy(&r, base + at, sizeof r);
            if (all_zero(r)) {
                if (in_epoch) why = "an epoch was begun and not committed";
                break;
            }
            if (!in_epoch && r.header_crc == 0 && (r.magic == 0 || r.magic == OL_RECORD_MAGIC)) {
                out.torn = true;  // BEGIN was being written
                why = "an epoch was begun and not committed";
            } else if (r.magic != OL_RECORD_MAGIC) why = "bytes that are not a record";
            else if (r.header_crc != struct_crc(r)) why = "record header fails its CRC";
            else if (r.sequence != sequence) why = "record of an earlier use of this place (sequence)";
            else if (r.length > size || padded(r.length) + (r.type == OL_END ? 0 : sizeof r) > size - at - sizeof r)
                why = "record length runs past the segment";  // behind all but END there is room for END
            else if (r.writer_epoch < writer || (in_epoch && r.writer_epoch != begin.writer_epoch)) why = "record of a writer that was fenced out";
            else if (in_epoch ? r.epoch != begin.epoch : r.epoch <= out.last_epoch) why = "record of another epoch";
            else if (crc32c(0, base + at + sizeof r, r.length) != r.payload_crc) why = "payload fails its CRC";
            else if (r.type == OL_BEGIN ? in_epoch : (!in_epoch && r.type != OL_END)) why = "records out of order";
            else if (r.type > OL_END && r.type < OL_DATA) why = "record of a type that this build does not know";
            if (!why.empty()) break;
            const uint8_t* payload = base + at + sizeof r;
            if (r.type == OL_END) {
                if (in_epoch) {
                    why = "a segment ends inside an epoch";
                    break;
                }
                ended = true;
                out.next_sequence = sequence + 1;
                out.end_offset = at + sizeof r;
                break;
            }
            if (r.type == OL_COMMIT) {
                ol_commit c;
                if (r.length != sizeof c) {
                    why = "commit record of a wrong length";
                    break;
                }
                std::memcpy(&c, payload, sizeof c);
                if (c.records != records || c.bytes != bytes || c.digest != digest) {
                    why = "commit record does not match its epoch";
                    break;
                }
                out.next_sequence = sequence + 1;
                out.last_epoch = r.epoch;
                out.epochs += 1;
                out.payload_bytes += bytes;
                out.end_offset = at + sizeof r + padded(r.length);
                committed = out.records.size();
                report.records += records;
                report.epochs += 1;
                report.last_epoch = r.epoch;
                writer = r.writer_epoch;
                in_epoch = false;
            } else {
                digest = crc32c(r.type == OL_BEGIN ? 0 : digest, &r, sizeof r);
                if (r.type == OL_BEGIN) {
                    begin = r;
                    in_epoch = true;
                    records = 0;
                    bytes = 0;
                } else {
                    out.records.push_back({reinterpret_cast<const ol_record*>(base + at), payload, number});
                    records += 1;
                    bytes += r.length;
                }
            }
            sequence += 1;
            at += sizeof r + padded(r.length);
        }
        out.max_writer_epoch = writer;
        out.records.resize(committed);
        report.used = out.end_offset;
        out.torn |= in_epoch;
        if (!why.empty()) {
            stop(number, at, why);
            return out;
        }
    }
    return out;
}

bool commit_behind(SegmentStore& store, const Scan& scan) {
    const auto existing = store.existing();
    const auto found = existing.find(scan.stop_segment);
    if (found == existing.end()) return false;
    const uint64_t size = store.segment_bytes();
    for (uint64_t at = std::max<uint64_t>(padded(scan.stop_offset), OL_SUPERBLOCK_BYTES); at + sizeof(ol_record) <= size; at += OL_RECORD_ALIGN) {
        ol_record r;
        std::memcpy(&r, found->second + at, sizeof r);
        if (r.magic == OL_RECORD_MAGIC && r.type == OL_COMMIT && r.epoch > scan.last_epoch && r.writer_epoch >= scan.max_writer_epoch &&
            r.header_crc == struct_crc(r))
            return true;
    }
    return false;
}

// ---- writing ---------------------------------------------------------------------------------------------------

LogWriter::LogWriter(std::unique_ptr<SegmentStore> store, ol_log_control* control, uint64_t writer_epoch, const uint8_t manifest[32],
                     const std::string& text, const Scan& scan, bool cold, bool durable)
    : store_(std::move(store)), control_(control), writer_epoch_(writer_epoch), manifest_text_(text), durable_(durable) {
    if (text.size() > OL_SUPERBLOCK_BYTES - OL_MANIFEST_OFFSET) fail(LogError::Kind::refused, "the manifest's text is too long");
    std::memcpy(manifest_.data(), manifest, 32);
    check_fence();
    if (!cold && writer_epoch < scan.max_writer_epoch)
        fail(LogError::Kind::fenced, "the log holds records of a newer writer");
    if (!cold && (scan.manifest_differs || (scan.end_segment != 0 && scan.manifest != manifest_)))
        fail(LogError::Kind::refused, "the log was written under another manifest (start cold to give up what it holds)");
    committed_ = scan.last_epoch;
    epoch_ = std::max(scan.last_epoch, scan.spent_epoch);
    sequence_ = scan.next_sequence;
    const auto existing = store_->existing();
    const bool afresh = cold || scan.end_segment == 0;
    segment_ = afresh ? (existing.empty() ? 0 : existing.rbegin()->first) : scan.end_segment;
    if (afresh) set_oldest(segment_ + 1);
    const uint64_t oldest = control_->oldest & number_mask;
    // From the newest on: whatever a crash leaves of them still begins with what was refused.
    for (auto at = existing.rbegin(); at != existing.rend(); ++at) {
        if (afresh || at->first > scan.end_segment || at->first < oldest) {
            store_->release(at->first);
        } else {
            segments_.emplace(at->first, at->second);
        }
    }
    roll_ = true;
    const auto last = segments_.find(segment_);
    if (last != segments_.end()) {
        base_ = last->second;
        tail_ = scan.end_offset;
        // A clean END leaves nothing to cut; otherwise the torn tail becomes a zero header before anything is appended.
        const auto* before = reinterpret_cast<const ol_record*>(base_ + tail_ - sizeof(ol_record));
        const bool closed = tail_ > OL_SUPERBLOCK_BYTES && before->magic == OL_RECORD_MAGIC && before->type == OL_END &&
                            before->header_crc == struct_crc(*before);
        if (closed) {
            base_ = nullptr;
        } else {
            reach_kill_point("open.cut");
            if (tail_ + sizeof(ol_record) <= store_->segment_bytes()) std::memset(base_ + tail_, 0, sizeof(ol_record));
            store_->flush(segment_, tail_, tail_ + sizeof(ol_record));
            roll_ = false;
        }
    }
}

void LogWriter::check_fence() const {
    if (fenced())
        fail(LogError::Kind::fenced, "writer " + std::to_string(writer_epoch_) + " was fenced out: the log belongs to writer " +
                                         std::to_string(control_->writer_epoch));
}

bool LogWriter::fenced() const {
    return std::atomic_ref<uint64_t>(control_->writer_epoch).load(std::memory_order_acquire) != writer_epoch_;
}

void LogWriter::set_oldest(uint64_t number) {
    std::atomic_ref<uint64_t>(control_->oldest).store(marked(number), std::memory_order_release);
    if (durable_ && msync(control_, OL_CONTROL_BYTES, MS_SYNC) != 0) fail(LogError::Kind::durability, system_text("flush the control page"));
}

void LogWriter::open_segment() {
    const uint64_t number = segment_ + 1;
    if (base_ != nullptr) {  // close the current one
        auto* end = reinterpret_cast<ol_record*>(base_ + tail_);
        ol_record r{};
        r.magic = OL_RECORD_MAGIC;
        r.type = OL_END;
        r.writer_epoch = writer_epoch_;
        r.epoch = epoch_;
        r.sequence = sequence_++;
        r.header_crc = struct_crc(r);
        std::memcpy(end, &r, sizeof r);
        store_->flush(segment_, tail_, tail_ + sizeof r);
        base_ = nullptr;
        reach_kill_point("segment.end");
    }
    uint8_t* base = store_->create(number);
    ol_superblock s{};
    std::memcpy(s.magic, OL_SEGMENT_MAGIC, 8);
    s.version = OL_LOG_VERSION;
    std::memcpy(s.uuid, control_->uuid, 16);
    s.segment = number;
    s.bytes = store_->segment_bytes();
    s.writer_epoch = writer_epoch_;
    s.epoch = epoch_;
    s.sequence = sequence_;
    s.manifest_bytes = static_cast<uint32_t>(manifest_text_.size());
    std::memcpy(s.manifest, manifest_.data(), 32);
    s.header_crc = struct_crc(s);
    std::memcpy(base + OL_MANIFEST_OFFSET, manifest_text_.data(), manifest_text_.size());
    std::memset(base + OL_SUPERBLOCK_BYTES, 0, sizeof(ol_record));
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(base, &s, sizeof s);
    store_->flush(number, 0, OL_SUPERBLOCK_BYTES + sizeof(ol_record));
    segments_.emplace(number, base);
    segment_ = number;
    base_ = base;
    tail_ = OL_SUPERBLOCK_BYTES;
    roll_ = false;
    reach_kill_point("segment.create");
}

void LogWriter::roll() { roll_ = true; }

void LogWriter::begin(uint64_t bytes, uint32_t records) {
    if (open_) fail(LogError::Kind::refused, "an epoch is open already");
    check_fence();
    // BEGIN, each record with its padding, COMMIT with payload, END and the zero header
    const uint64_t room = store_->segment_bytes() - OL_SUPERBLOCK_BYTES;
    const uint64_t need = sizeof(ol_record) + std::min(bytes, room) + uint64_t{records} * 2 * sizeof(ol_record) + 2 * sizeof(ol_record) + 2 * sizeof(ol_record);
    if (need > room)
        fail(LogError::Kind::refused, "an epoch of " + std::to_string(bytes) + " bytes does not fit a segment of " +
                                          std::to_string(store_->segment_bytes()));
    epoch_ += 1;
    if (roll_ || base_ == nullptr || tail_ + need > store_->segment_bytes()) {
        try {
            open_segment();
        } catch (...) {
            roll_ = true;
            throw;
        }
    }
    epoch_start_ = tail_;
    epoch_sequence_ = sequence_;
    epoch_bytes_ = 0;
    epoch_records_ = 0;
    room_bytes_ = tail_ + need;
    reserved_.clear();
    open_ = true;
    reach_kill_point("begin");
    Fields f;
    f.type = OL_BEGIN;
    ol_record* r = place(f, 0);
    r->magic = OL_RECORD_MAGIC;
    r->header_crc = struct_crc(*r);
    reach_kill_point("begin.written");
}

// Lays a header down without its magic: it becomes a record only when it is sealed.
ol_record* LogWriter::place(const Fields& f, uint32_t length) {
    if (!open_) fail(LogError::Kind::refused, "no epoch is open");
    const uint64_t next = tail_ + sizeof(ol_record) + padded(length);
    if (next + 2 * sizeof(ol_record) > room_bytes_) fail(LogError::Kind::refused, "the epoch holds more than begin() was told");
    auto* r = reinterpret_cast<ol_record*>(base_ + tail_);
    ol_record h{};
    h.type = f.type;
    h.writer_epoch = writer_epoch_;
    h.epoch = epoch_;
    h.region = f.region;
    h.generation = f.generation;
    h.key = f.key;
    h.offset = f.offset;
    h.count = f.count;
    h.length = length;
    h.sequence = sequence_++;
    std::memcpy(r, &h, sizeof h);
    tail_ = next;
    if (f.type >= OL_DATA) {
        epoch_records_ += 1;
        epoch_bytes_ += length;
    }
    return r;
}

void LogWriter::append(const Fields& f, const void* payload, uint32_t length) {
    if (f.type < OL_DATA) fail(LogError::Kind::refused, "record types below 16 belong to the log itself");
    ol_record* r = place(f, length);
    r->payload_crc = crc32c_copy(0, reinterpret_cast<uint8_t*>(r + 1), payload, length);
    reach_kill_point("append.payload");
    r->magic = OL_RECORD_MAGIC;
    r->header_crc = struct_crc(*r);
    reserved_.push_back({r});
    reach_kill_point("append.header");
}

uint8_t* LogWriter::reserve(const Fields& f, uint32_t length, uint32_t* handle) {
    if (f.type < OL_DATA) fail(LogError::Kind::refused, "record types below 16 belong to the log itself");
    ol_record* r = place(f, length);
    *handle = static_cast<uint32_t>(reserved_.size());
    reserved_.push_back({r});
    return reinterpret_cast<uint8_t*>(r + 1);
}

void LogWriter::seal(uint32_t handle) {
    if (handle >= reserved_.size()) fail(LogError::Kind::refused, "no such reservation");
    ol_record* r = reserved_[handle].header;
    r->payload_crc = crc32c(0, r + 1, r->length);
    reach_kill_point("append.payload");
    r->magic = OL_RECORD_MAGIC;
    r->header_crc = struct_crc(*r);
    reach_kill_point("append.header");
}

void LogWriter::commit() {
    if (!open_) fail(LogError::Kind::refused, "no epoch is open");
    uint32_t digest = crc32c(0, base_ + epoch_start_, sizeof(ol_record));
    for (const Reserved& x : reserved_) {
        if (x.header->magic != OL_RECORD_MAGIC) fail(LogError::Kind::refused, "a reserved record was not sealed");
        digest = crc32c(digest, x.header, sizeof(ol_record));
    }
    reach_kill_point("commit");
    check_fence();
    const ol_commit c{epoch_bytes_, epoch_records_, digest};
    const uint64_t at = tail_;
    auto* r = reinterpret_cast<ol_record*>(base_ + at);
    const uint64_t next = at + sizeof(ol_record) + padded(sizeof c);
    std::memset(r, 0, next + sizeof(ol_record) - at);  // the place of COMMIT and the zero header behind it
    std::memcpy(r + 1, &c, sizeof c);
    reach_kill_point("commit.payload");
    ol_record h{};
    h.magic = OL_RECORD_MAGIC;
    h.type = OL_COMMIT;
    h.writer_epoch = writer_epoch_;
    h.epoch = epoch_;
    h.length = sizeof c;
    h.sequence = sequence_++;
    h.payload_crc = crc32c(0, &c, sizeof c);
    h.header_crc = struct_crc(h);
    std::atomic_thread_fence(std::memory_order_release);
    std::memcpy(r, &h, sizeof h);
    reach_kill_point("commit.header");
    if (durable_) {
        // One flush for all: should COMMIT reach the medium before the data, the CRCs and the digest refuse the epoch.
        try {
            store_->flush(segment_, epoch_start_, next + sizeof(ol_record));
        } catch (...) {
            std::memset(r, 0, sizeof h);
            throw;
        }
    }
    tail_ = next;
    committed_ = epoch_;
    bytes_appended_ += tail_ - epoch_start_;
    open_ = false;
}

void LogWriter::abort() noexcept {
    if (!open_) return;
    // The epoch's number is spent: left-over records can not pass for those of the next attempt.
    tail_ = epoch_start_;
    sequence_ = epoch_sequence_;
    if (!fenced()) std::memset(base_ + tail_, 0, sizeof(ol_record));  // else the place may hold the next writer's epoch
    open_ = false;
}

std::vector<ScannedRecord> LogWriter::records_of(uint64_t segment, uint64_t key) const {
    if (open_) fail(LogError::Kind::refused, "an epoch is open");
    std::vector<ScannedRecord> out;
    const auto found = segments_.find(segment);
    if (found == segments_.end()) return out;
    const uint64_t end = segment == segment_ && base_ != nullptr ? tail_ : store_->segment_bytes();
    for (uint64_t at = OL_SUPERBLOCK_BYTES; at + sizeof(ol_record) <= end;) {
        ol_record r;
        std::memcpy(&r, found->second + at, sizeof r);
        if (r.magic != OL_RECORD_MAGIC || r.type == OL_END || r.length > end - at - sizeof r) break;
        const uint8_t* payload = found->second + at + sizeof r;
        if (r.type >= OL_DATA && r.key == key) {
            if (r.header_crc != struct_crc(r) || r.payload_crc != crc32c(0, payload, r.length)) break;
            out.push_back({reinterpret_cast<const ol_record*>(found->second + at), payload, segment});
        }
        at += sizeof r + padded(r.length);
    }
    return out;
}

void LogWriter::release_before(uint64_t segment) {
    check_fence();
    const uint64_t oldest = std::min(segment, segment_);
    if (segments_.empty() || segments_.begin()->first >= oldest) return;
    set_oldest(oldest);
    while (!segments_.empty() && segments_.begin()->first < segment && segments_.begin()->first != segment_) {
        const uint64_t number = segments_.begin()->first;
        segments_.erase(segments_.begin());
        store_->release(number);
        reach_kill_point("release");
    }
}

uint64_t LogWriter::used_bytes() const {
    if (segments_.empty()) return 0;
    return (segments_.size() - 1) * store_->segment_bytes() + tail_;
}

}  // namespace outlast
