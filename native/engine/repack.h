/* From the GGUF's row layout to the interleaved layout of model.h. */
#ifndef OUTLAST_ENGINE_REPACK_H
#define OUTLAST_ENGINE_REPACK_H
#include "model.h"

namespace outlast::engine {

/* Bytes of one row as the GGUF stores it; 0 if `columns` does not fit the type. */
size_t source_row_bytes(Type type, uint32_t columns);
/* Repacks groups [first, last) of a matrix of `rows` rows. `to` is the start of the repacked matrix. */
void repack(Type type, const uint8_t *from, uint32_t rows, uint32_t columns, uint8_t *to, uint32_t first, uint32_t last);
/* Row `row` of a repacked matrix as floats. */
void read_row(const Matrix &m, uint32_t row, float *out);

}  // namespace outlast::engine
#endif
