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

/* Bytes are taken piece by piece, which is the order they lie in: [piece][token][row_bytes]. */
OL_OPERATOR(kv_digest, ol_kv_args, a) {
    if (blockIdx.x != 0) return OL_OK;
    OL_KV_GEOMETRY(a);
    if (a->first % block_tokens != 0 || a->count != block_tokens) OL_FAIL("a digest is of one whole block");
    const uint32_t block = reinterpret_cast<const uint32_t *>(a->table)[a->first / block_tokens];
    if (block >= blocks) OL_FAIL("block table names block %u of %u at position %u", block, blocks, a->first);
    const uint32_t *key = ol_kv_digest_key();
    const uint64_t run = static_cast<uint64_t>(block_tokens) * row_bytes;
    ol_digest sum{{0, 0, 0, 0}};
    uint64_t weight = 1;
    for (uint32_t p = 0; p < pieces; ++p) {
        const char *from = reinterpret_cast<const char *>(a->base) + block * block_bytes + p * piece_stride;
        for (uint64_t done = 0; done < run;) {
            ol_digest d;
            const uint64_t left = run - done;
            if (left >= OL_NH_MAX_BYTES) {
                ol_nh(key, from + done, OL_NH_MAX_BYTES, &d);
                done += OL_NH_MAX_BYTES;
            } else { /* the rest, padded with zeros to whole vectors; its length is fixed by the geometry */
                alignas(64) char rest[OL_NH_MAX_BYTES] = {};
                std::memcpy(rest, from + done, left);
                ol_nh(key, rest, static_cast<uint32_t>((left + 31) & ~uint64_t{31}), &d);
                done = run;
            }
            /* chained by a polynomial in an odd constant, so that exchanged pieces change the sum */
            for (int k = 0; k < 4; ++k) sum.v[k] = sum.v[k] * 0x9ddfea08eb382d69ull + (d.v[k] ^ (d.v[k] >> 29)) + weight;
            weight += 2;
        }
    }
    std::memcpy(reinterpret_cast<char *>(a->staged), sum.v, sizeof sum.v);
    return OL_OK;
}
#endif
