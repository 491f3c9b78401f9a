#include "device.h"
#include "moves.h"

KERNEL(gather_rows, 256, 4)
(u8 *stream, i64 bytes, u8 *const *places, const i64 *ends, int count, u64 *total, i64 first_block) {
    gather_block(stream, bytes, {places, ends, count}, total, first_block);
}

KERNEL(scatter_rows, 256, 4)(const u8 *stream, i64 bytes, u8 *const *places, const i64 *ends, int count) {
    scatter_block(stream, bytes, {places, ends, count});
}

KERNEL(digest, 256, 4)(const u8 *stream, i64 bytes, u64 *total) { digest_stream_block(stream, bytes, total); }
