/* kv_digest: digest of the logical bytes of a full block, written as 32 staged bytes.  Made when a block is sealed and
 * again when it was rebuilt from the log; the two must agree before the block is used. */
#ifndef OUTLAST_OPS_KV_DIGEST_H
#define OUTLAST_OPS_KV_DIGEST_H
#include "outlast/hash.h"
#include "outlast/ops/kv.h"

/* The key is public and constant: the digest guards against faults, not against an attacker. */
static const uint32_t *ol_kv_digest_key() {
    static const struct Key {
        uint32_t words[OL_NH_KEY_WORDS];
        Key() { ol_nh_key(0x6b762d6469676573ull, words); }
    } key;
    return key.words;
}

OL_OPERATOR(kv_digest, ol_kv_args, a) {
    if (blockIdx.x != 0) return OL_OK;
    OL_KV_GEOMETRY(a);
    const auto *table = reinterpret_cast<const uint32_t *>(a->table);
    const uint32_t *key = ol_kv_digest_key();
    ol_digest sum{{0, 0, 0, 0}};
    alignas(64) char piece[OL_NH_MAX_BYTES];
    uint32_t filled = 0;
    uint64_t weight = 1;
    const auto fold = [&] {
        std::memset(piece + filled, 0, (32 - filled % 32) % 32);
        ol_digest d;
        ol_nh(key, piece, (filled + 31) & ~31u, &d);
        /* chain by a polynomial in an odd constant, so that exchanged pieces change the sum */
        for (int k = 0; k < 4; ++k) sum.v[k] = sum.v[k] * 0x9ddfea08eb382d69ull + (d.v[k] ^ (d.v[k] >> 29)) + weight;
        weight += 2;
        filled = 0;
    };
    for (uint32_t i = 0; i < a->count; ++i) {
        const uint32_t position = a->first + i, block = table[position / block_tokens];
        if (block >= blocks) OL_FAIL("block table names block %u of %u at position %u", block, blocks, position);
        const char *from = reinterpret_cast<const char *>(a->base) + block * block_bytes +
                           static_cast<uint64_t>(position % block_tokens) * row_bytes;
        for (uint32_t p = 0; p < pieces; ++p) {
            for (uint32_t done = 0; done < row_bytes;) {
                const uint32_t room = OL_NH_MAX_BYTES - filled, take = row_bytes - done < room ? row_bytes - done : room;
                std::memcpy(piece + filled, from + p * piece_stride + done, take);
                filled += take;
                done += take;
                if (filled == OL_NH_MAX_BYTES) fold();
            }
        }
    }
    if (filled != 0) fold();
    std::memcpy(reinterpret_cast<char *>(a->staged), sum.v, sizeof sum.v);
    return OL_OK;
}
#endif
