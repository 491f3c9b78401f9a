// Drawing tokens, log-probabilities and the counts behind penalties: backends/gpu/kernels/sample.h.
#include "device.h"
#include "sample.h"

KERNEL(sample_adjust, CHUNK_THREADS, 3)
(const float *logits, float *z, const SampleRow *rows, const i32 *lists, const i32 *inputs, const i32 *counts,
 const u32 *masks, u8 *work, i32 vocab, i32 pitch) {
    adjust(logits, z, rows, lists, inputs, counts, masks, work, vocab, pitch);
}

KERNEL(sample_count, CHUNK_THREADS, 4)
(const float *logits, const float *z, const SampleRow *rows, u8 *work, i32 vocab, i32 pitch) {
    count(logits, z, rows, work, vocab, pitch);
}

KERNEL(sample_gather, CHUNK_THREADS, 4)
(const float *logits, const float *z, const SampleRow *rows, u8 *work, i32 vocab, i32 pitch) {
    gather(logits, z, rows, work, vocab, pitch);
}

KERNEL(sample_draw, BINS, 1)
(const float *logits, const float *z, const SampleRow *rows, u8 *work, i32 *tokens, i32 *statuses, i32 vocab, i32 pitch) {
    draw(logits, z, rows, work, tokens, statuses, vocab, pitch);
}

KERNEL(sample_told, BINS, 1)
(const float *logits, const SampleRow *rows, u8 *work, const i32 *tokens, Told *told, i32 vocab, i32 pitch) {
    tell(logits, rows, work, tokens, told, vocab, pitch);
}

KERNEL(counts_add, CHUNK_THREADS, 1)
(i32 *counts, const i32 *tokens, const i32 *slots, const u8 *generated, i32 entries, i32 vocab, i32 amount) {
    add_counts(counts, tokens, slots, generated, entries, vocab, amount);
}
