/* Byte layout of the epoch log.  Little endian.  Explained in docs/reference/log-format.md.
 *
 * A log is one control page and a run of segments numbered 1, 2, 3 ... without gaps.  A segment is a superblock of
 * OL_SUPERBLOCK_BYTES followed by records, each a 64-byte header and its payload, padded to 64 bytes.
 * An epoch is BEGIN, any number of data records, COMMIT, all in one segment; it counts as a whole or not at all.
 *
 * Words and who writes them:
 *   control.writer_epoch  the owner (supervisor) raises it to fence a writer out; writers only read it
 *   control.oldest        the writer, before it releases older segments; a reader starts at this segment or not at all,
 *                         so that losing the first segment can not pass for having released it
 *   everything else       the one writer whose epoch equals control.writer_epoch
 * Order of an epoch: payloads and data headers in any order; a zero header behind the place of COMMIT; then, after a
 * release fence and (durability `host`) a flush, COMMIT itself.  A record is valid when its magic, header CRC, payload
 * CRC, sequence (one more than the record before) and epoch fit; the first record that does not ends the log.
 */
#ifndef OUTLAST_LOG_H
#define OUTLAST_LOG_H
#ifdef __cplusplus
#include <cstdint>
extern "C" {
#else
#include <stdint.h>
#endif

#define OL_LOG_VERSION 1u
#define OL_CONTROL_BYTES 4096u
#define OL_SUPERBLOCK_BYTES 4096u
#define OL_SEGMENT_BITS 40u         /* of a segment's number */
#define OL_MANIFEST_OFFSET 128u     /* in the segment; text up to the end of the superblock */
#define OL_RECORD_ALIGN 64u
#define OL_RECORD_MAGIC 0x4c52434fu /* "OCRL" */
#define OL_CONTROL_MAGIC "OLCTRL1"  /* with its NUL, 8 bytes */
#define OL_SEGMENT_MAGIC "OLSEGM1"

/* record types */
#define OL_BEGIN 1      /* key: records that follow, 0 = not known */
#define OL_COMMIT 2     /* payload: ol_commit */
#define OL_END 3        /* the segment is full; the log goes on in the next one */
#define OL_DATA 16      /* first type free for data; the log does not look inside */
#define OL_KV_ROWS 16   /* region KV: `count` tokens from position `offset` of request `key` */
#define OL_KV_SEAL 17   /* region KV: block `offset` of `key` is full; payload: its digest */
#define OL_APPEND 18    /* append-only region: bytes from offset `key` on */
#define OL_PAGES 19     /* opaque region: `count` pages from page `key` on */
#define OL_REQUEST 20   /* request state: prompt and parameters of request `key` */
#define OL_EMISSION 21  /* request state: `count` ol_emission from generated token `offset` on */
#define OL_DROP 22      /* everything of `key` up to here is dead */

typedef struct ol_log_control {
    char magic[8];
    uint32_t version;
    uint32_t segments;      /* places for segments (memory); 0 = one file each */
    uint64_t segment_bytes;
    uint8_t uuid[16];       /* identity of the log */
    uint64_t writer_epoch;
    uint64_t oldest;        /* number of the first segment that counts (40 bits); above it 24 bits of the CRC32C of that
                               number as 8 bytes.  One word, so that a crash leaves the one or the other */
} ol_log_control;

typedef struct ol_superblock {
    char magic[8];
    uint32_t version;
    uint32_t header_crc;    /* CRC32C of the structure with this field 0 */
    uint8_t uuid[16];
    uint64_t segment;       /* number */
    uint64_t bytes;         /* size of the segment, superblock included */
    uint64_t writer_epoch;  /* of the writer that opened the segment */
    uint64_t epoch;         /* first epoch in the segment */
    uint32_t sequence;      /* sequence of its first record */
    uint32_t manifest_bytes;/* length of the manifest's text, which stands at OL_MANIFEST_OFFSET */
    uint8_t manifest[32];   /* SHA-256 of that text */
} ol_superblock;

typedef struct ol_record {
    uint32_t magic;
    uint16_t type;
    uint16_t flags;         /* 0 */
    uint32_t header_crc;    /* CRC32C of the header with this field 0 */
    uint32_t payload_crc;   /* CRC32C of the payload without padding */
    uint64_t writer_epoch;
    uint64_t epoch;
    uint32_t region;
    uint32_t generation;    /* incarnation of the region's or request's state */
    uint64_t key;           /* logical address; never a physical one */
    uint32_t offset;
    uint32_t count;
    uint32_t length;        /* payload bytes; bounded by the segment before it is trusted */
    uint32_t sequence;      /* one more than the record before, modulo 2^32 */
} ol_record;

typedef struct ol_commit {
    uint64_t bytes;         /* payload bytes of the data records */
    uint32_t records;       /* data records */
    uint32_t digest;        /* CRC32C over the headers of BEGIN and the data records, in order */
} ol_commit;

#ifdef __cplusplus
}
static_assert(sizeof(ol_log_control) == 56, "layout of ol_log_control");
static_assert(sizeof(ol_superblock) == 104, "layout of ol_superblock");
static_assert(sizeof(ol_record) == 64, "a record header is one cache line");
static_assert(sizeof(ol_commit) == 16, "layout of ol_commit");
#endif
#endif
