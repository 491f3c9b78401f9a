#include "attention_few.h"

#define ENTRY(type, dims) \
    KERNEL(attention_few_##type##_d##dims, FEW_THREADS, 2)(ATTENTION_PARAMS) { attention_few<Kv_##type, dims>(ATTENTION_ARGS); }
EACH_KV_HEAD(ENTRY)
