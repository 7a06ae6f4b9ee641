// Fuzz of the log's reader and writer over damaged memory; built with AddressSanitizer by tests/core/test_log_damage.py.
//
//     log_fuzz SEED ROUNDS
//
// A valid log is damaged: random bytes, or fields of control page, superblocks and records, whose CRCs are then made right
// again.  The arena lies at the end of a heap block, so one byte too far is reported.  Then a writer goes on with whatever
// the reader accepted.
#include "../core/crc32c.hpp"
#include "../core/log.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

using namespace outlast;

namespace {

constexpr uint64_t segment_bytes = 16384, places = 4, arena_bytes = OL_CONTROL_BYTES + places * segment_bytes;

template <class T> void seal(T* s) {
    s->header_crc = 0;
    s->header_crc = crc32c(0, s, sizeof *s);
}

uint64_t oldest_word(uint64_t number) {
    return number | uint64_t{crc32c(0, &number, sizeof number) & 0xffffff} << OL_SEGMENT_BITS;
}

void fill(uint8_t* arena, std::mt19937_64& rng) {
    std::memset(arena, 0, arena_bytes);
    auto* control = reinterpret_cast<ol_log_control*>(arena);
    std::memcpy(control->magic, OL_CONTROL_MAGIC, 8);
    control->version = OL_LOG_VERSION;
    control->segments = places;
    control->segment_bytes = segment_bytes;
    control->writer_epoch = 1;
    control->oldest = oldest_word(1);
    auto store = arena_store(arena, arena_bytes);
    const Scan scan = scan_log(*store, control, nullptr);
    const uint8_t manifest[32] = {7};
    LogWriter writer(std::move(store), control, 1, manifest, "{}", scan, false, false);
    const uint8_t payload[3000] = {1, 2, 3};
    for (uint64_t i = 0; i < 4 + rng() % 6; ++i) {
        if (rng() % 3 == 0 && writer.places_left() > 1) writer.roll();
        if (writer.places_left() == 0) break;
        writer.begin(2 * sizeof payload, 2);
        writer.append({OL_DATA, 1, 1, i, 0, 1}, payload, static_cast<uint32_t>(rng() % sizeof payload));
        writer.append({OL_DATA + 1, 1, 1, i, 0, 1}, payload, static_cast<uint32_t>(rng() % 100));
        if (rng() % 8 == 0) writer.abort();
        else writer.commit();
    }
}

uint64_t odd_number(std::mt19937_64& rng) {
    const uint64_t some[] = {0, 1, 2, 3, 16, 63, 64, 65, 4096, segment_bytes, segment_bytes - 4096, segment_bytes - 4160, 0x7fffffff, 0xffffffff,
                             0xffffffc0, ~uint64_t{0}, ~uint64_t{0} - 63};
    return rng() % 4 == 0 ? rng() : some[rng() % std::size(some)];
}

void damage(uint8_t* arena, std::mt19937_64& rng) {
    for (uint64_t n = 1 + rng() % 4; n-- > 0;) {
        uint8_t* segment = arena + OL_CONTROL_BYTES + rng() % places * segment_bytes;
        switch (rng() % 4) {
            case 0: arena[rng() % arena_bytes] = static_cast<uint8_t>(rng()); break;
            case 1: {
                auto* control = reinterpret_cast<ol_log_control*>(arena);
                if (rng() % 2) control->oldest = oldest_word(odd_number(rng) % 7);
                else control->segments = static_cast<uint32_t>(odd_number(rng));
                break;
            }
            case 2: {
                auto* s = reinterpret_cast<ol_superblock*>(segment);
                const uint64_t value = odd_number(rng);
                switch (rng() % 6) {
                    case 0: s->segment = value; break;
                    case 1: s->epoch = value; break;
                    case 2: s->sequence = static_cast<uint32_t>(value); break;
                    case 3: s->manifest_bytes = static_cast<uint32_t>(value); break;
                    case 4: s->writer_epoch = value; break;
                    default: s->bytes = value;
                }
                seal(s);
                break;
            }
            default: {  // walk to a record
                uint64_t at = OL_SUPERBLOCK_BYTES;
                for (uint64_t skip = rng() % 12; skip-- > 0;) {
                    const auto* r = reinterpret_cast<const ol_record*>(segment + at);
                    const uint64_t next = at + 64 + ((uint64_t{r->length} + 63) & ~uint64_t{63});
                    if (r->magic != OL_RECORD_MAGIC || next + 64 > segment_bytes) break;
                    at = next;
                }
                auto* r = reinterpret_cast<ol_record*>(segment + at);
                const uint64_t value = odd_number(rng);
                switch (rng() % 6) {
                    case 0: r->length = static_cast<uint32_t>(value); break;
                    case 1: r->type = static_cast<uint16_t>(value); break;
                    case 2: r->epoch = value; break;
                    case 3: r->sequence = static_cast<uint32_t>(value); break;
                    case 4: r->writer_epoch = value; break;
                    default: r->count = static_cast<uint32_t>(value);
                }
                if (at + 64 + r->length <= segment_bytes) r->payload_crc = crc32c(0, r + 1, r->length);
                seal(r);
            }
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    std::mt19937_64 rng(std::strtoull(argv[1], nullptr, 10));
    uint64_t read = 0, written = 0, refused = 0;
    for (uint64_t round = std::strtoull(argv[2], nullptr, 10); round-- > 0;) {
        auto* arena = static_cast<uint8_t*>(std::aligned_alloc(64, arena_bytes));
        fill(arena, rng);
        damage(arena, rng);
        try {
            auto* control = reinterpret_cast<ol_log_control*>(arena);
            auto store = arena_store(arena, arena_bytes);
            const uint8_t manifest[32] = {7};
            const Scan scan = scan_log(*store, control, rng() % 2 ? manifest : nullptr);
            uint64_t sum = 0;
            for (const auto& r : scan.records) sum += crc32c(0, r.payload, r.header->length);
            commit_behind(*store, scan);
            read += scan.records.size() + (sum == 1);
            LogWriter writer(std::move(store), control, control->writer_epoch, manifest, "{}", scan, rng() % 8 == 0, false);
            const uint8_t payload[2000] = {};
            for (int i = 0; i < 12; ++i) {
                writer.begin(sizeof payload, 1);
                writer.append({OL_DATA, 1, 1, 5, 0, 1}, payload, static_cast<uint32_t>(rng() % sizeof payload));
                writer.commit();
                if (writer.places_left() == 0) writer.release_before(writer.segment());
                ++written;
            }
        } catch (const LogError&) {
            ++refused;
        }
        std::free(arena);
    }
    std::printf("ok: %llu records read, %llu written, %llu logs refused\n", static_cast<unsigned long long>(read),
                static_cast<unsigned long long>(written), static_cast<unsigned long long>(refused));
    return 0;
}
