#include "attention_merge.h"

KERNEL(attention_merge, MERGE_THREADS, 8)(ATTENTION_PARAMS, i32 dims) { merge_parts(ATTENTION_ARGS, dims); }
