/* Error texts of operators on a device: what OL_FAIL does where there is no snprintf.
 *
 * Knows %d %i %u %x with the lengths h l ll z, %c, %s and %%; flags and widths are passed over.  Anything else stands in
 * the text as it was written.  Included by dialect.h.
 */
#ifndef OUTLAST_CUDA_SAY_H
#define OUTLAST_CUDA_SAY_H
#ifdef __CUDACC_RTC__

/* One argument of a text as 64 bits; signed integers are extended, so that %d needs no length. */
template <class T> OL_DEVICE uint64_t ol_said(T value) { return static_cast<uint64_t>(static_cast<int64_t>(value)); }
OL_DEVICE uint64_t ol_said(uint32_t value) { return value; }
OL_DEVICE uint64_t ol_said(const char *value) { return reinterpret_cast<uint64_t>(value); }

static __device__ __noinline__ void ol_write_text(ol_env *env, const char *format, const uint64_t *value, int values) {
    if (atomicExch(&env->reserved, 1u) != 0) return; /* the worker clears it before each task */
    char *to = env->error, *end = env->error + sizeof env->error - 1;
    int used = 0;
    for (const char *p = format; *p != '\0' && to < end; ++p) {
        if (*p != '%') {
            *to++ = *p;
            continue;
        }
        const char *spec = p + 1;
        while ((*spec >= '0' && *spec <= '9') || *spec == 'l' || *spec == 'h' || *spec == 'z' || *spec == '-') ++spec;
        if (*spec == '%') {
            *to++ = '%';
            p = spec;
            continue;
        }
        if (used == values || (*spec != 'd' && *spec != 'i' && *spec != 'u' && *spec != 'x' && *spec != 's' && *spec != 'c')) {
            *to++ = *p;
            continue;
        }
        uint64_t v = value[used++];
        p = spec;
        if (*spec == 's') {
            for (const char *text = reinterpret_cast<const char *>(v); *text != '\0' && to < end;) *to++ = *text++;
        } else if (*spec == 'c') {
            *to++ = static_cast<char>(v);
        } else {
            if ((*spec == 'd' || *spec == 'i') && static_cast<int64_t>(v) < 0) {
                *to++ = '-';
                v = ~v + 1;
            }
            const uint64_t base = *spec == 'x' ? 16 : 10;
            uint64_t unit = 1;
            while (v / unit >= base) unit *= base;
            for (; unit != 0 && to < end; unit /= base) *to++ = "0123456789abcdef"[v / unit % base];
        }
    }
    *to = '\0';
}

template <class... Values> OL_DEVICE void ol_say(ol_env *env, const char *format, Values... values) {
    const uint64_t words[sizeof...(Values) + 1] = {ol_said(values)..., 0};
    ol_write_text(env, format, words, sizeof...(Values));
}

#endif
#endif
