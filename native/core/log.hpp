// The epoch log: one writer, segments in memory or in files, a scanner that trusts nothing.
#pragma once
#include "outlast/log.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace outlast {

struct LogError : std::runtime_error {
    enum class Kind { fenced, durability, corrupt, refused };
    Kind kind;
    LogError(Kind k, const std::string& text) : std::runtime_error(text), kind(k) {}
};

// Where segments live.  Addresses stay valid until release() or the store's end.
class SegmentStore {
  public:
    virtual ~SegmentStore() = default;
    virtual uint64_t segment_bytes() const = 0;
    virtual std::map<uint64_t, uint8_t*> existing() = 0;  // number (from the superblock or the name) -> address
    virtual uint8_t* create(uint64_t number) = 0;         // zeroed superblock; throws LogError(durability)
    virtual void release(uint64_t number) = 0;            // for ever
    virtual void flush(uint64_t number, size_t from, size_t to) = 0;  // throws LogError(durability)
    virtual uint64_t places_left() const = 0;             // segments that can still be created
};

// Segments in one mapping behind the control page.  Does not own the mapping.
std::unique_ptr<SegmentStore> arena_store(uint8_t* base, uint64_t bytes);
// One file per segment in a directory, 0600, preallocated so that a full disk shows at creation.
// max_segments bounds the log.  durable = flush() makes the bytes survive the host (fdatasync).
std::unique_ptr<SegmentStore> file_store(const std::string& directory, uint64_t segment_bytes, uint64_t max_segments, bool writable,
                                         bool durable);

struct ScannedRecord {
    const ol_record* header;
    const uint8_t* payload;
    uint64_t segment;
};

struct SegmentReport {
    uint64_t number, bytes, used, writer_epoch, first_epoch, last_epoch, records, epochs;
};

// The result of reading a log from its first segment to the first thing that does not fit.
struct Scan {
    std::vector<ScannedRecord> records;   // data records of committed epochs, in order
    std::vector<SegmentReport> segments;
    uint64_t spent_epoch = 0;  // no later epoch may have this number or less, if only because an attempt was taken back
    uint64_t epochs = 0, last_epoch = 0, max_writer_epoch = 0, payload_bytes = 0;
    uint64_t end_segment = 0, end_offset = 0;  // just behind the last COMMIT (or END)
    uint32_t next_sequence = 0;
    uint64_t stop_segment = 0, stop_offset = 0;
    std::string stop;      // why reading ended; "" = at a clean end
    bool torn = false;     // an epoch was begun and not committed
    bool manifest_differs = false;
    std::array<uint8_t, 32> manifest{};
    std::string manifest_text;  // of the first segment; not yet compared with its digest
};

// manifest = nullptr: any.  Reads only what lies inside the segments; every length is checked first.
Scan scan_log(SegmentStore& store, const ol_log_control* control, const uint8_t* manifest);

// Whether a COMMIT of a newer epoch stands behind the place where reading stopped.  A crash leaves none there, so it tells
// damage from a torn tail.  Looks at the rest of the segment, which a takeover has no time for.
bool commit_behind(SegmentStore& store, const Scan& scan);

class LogWriter {
  public:
    // Becomes the writer `writer_epoch`: cuts what `scan` did not accept, then appends behind it.
    // With `cold` everything is released first.  Throws LogError(fenced) if the control page names another writer,
    // LogError(refused) if the log was written under another manifest and `cold` is not given.
    // `text` is what `manifest` is the digest of, at most OL_SUPERBLOCK_BYTES - OL_MANIFEST_OFFSET bytes.
    LogWriter(std::unique_ptr<SegmentStore> store, ol_log_control* control, uint64_t writer_epoch, const uint8_t manifest[32],
              const std::string& text, const Scan& scan, bool cold, bool durable);

    struct Fields {
        uint16_t type = OL_DATA;
        uint32_t region = 0, generation = 0;
        uint64_t key = 0;
        uint32_t offset = 0, count = 0;
    };

    // Opens an epoch for which at most `records` data records with `bytes` payload bytes will be written.
    void begin(uint64_t bytes, uint32_t records);
    // Appends a record; the payload is copied once and the copy is hashed.
    void append(const Fields& f, const void* payload, uint32_t length);
    // Leaves room for a record whose payload the caller writes into the returned bytes before seal().
    // reserve() is for the thread that plans; seal() may run on any thread, once per record.
    uint8_t* reserve(const Fields& f, uint32_t length, uint32_t* handle);
    void seal(uint32_t handle);
    void commit();
    void abort() noexcept;

    // Data records of `key` in a segment, as committed by this writer or found by its scan; payloads are checked.  A record
    // that does not hold ends the list.  Not while an epoch is open.
    std::vector<ScannedRecord> records_of(uint64_t segment, uint64_t key) const;

    void release_before(uint64_t segment);
    // The next epoch starts a new segment.
    void roll();

    bool in_epoch() const { return open_; }
    uint64_t epoch() const { return epoch_; }
    uint64_t committed_epoch() const { return committed_; }
    uint64_t writer_epoch() const { return writer_epoch_; }
    uint64_t segment() const { return segment_; }
    uint64_t oldest_segment() const { return segments_.empty() ? 0 : segments_.begin()->first; }
    uint64_t places_left() const { return store_->places_left(); }
    uint64_t bytes_appended() const { return bytes_appended_; }
    uint64_t used_bytes() const;
    uint64_t segment_bytes() const { return store_->segment_bytes(); }

  private:
    ol_record* place(const Fields& f, uint32_t length);
    void open_segment();
    bool fenced() const;
    void check_fence() const;
    void set_oldest(uint64_t number);

    struct Reserved {
        ol_record* header;
    };

    std::unique_ptr<SegmentStore> store_;
    ol_log_control* control_;
    const uint64_t writer_epoch_;
    std::array<uint8_t, 32> manifest_{};
    const std::string manifest_text_;
    const bool durable_;
    std::map<uint64_t, uint8_t*> segments_;
    uint64_t segment_ = 0;
    uint8_t* base_ = nullptr;
    uint64_t tail_ = 0;         // offset in the segment
    uint64_t epoch_start_ = 0;
    uint32_t sequence_ = 0, epoch_sequence_ = 0;
    uint64_t epoch_ = 0, committed_ = 0;
    uint64_t epoch_bytes_ = 0, room_bytes_ = 0;
    uint32_t epoch_records_ = 0;
    std::vector<Reserved> reserved_;
    bool open_ = false;
    bool roll_ = false;
    uint64_t bytes_appended_ = 0;
};

// Fault injection: SIGKILL the process the n-th time it passes a named point.  Off (one load and branch) unless armed.
void arm_kill_point(const std::string& name, uint32_t countdown);
std::vector<std::string> kill_points();
void reach_kill_point(const char* name);

}  // namespace outlast
