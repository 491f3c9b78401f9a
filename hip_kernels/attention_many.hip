#include "attention_many.h"

#define ENTRY(type, dims)                                                                                                     \
    KERNEL(attention_many_##type##_d##dims, Head<dims>::THREADS, (dims > 128 ? 1 : 2))(ATTENTION_PARAMS) {                    \
        attention_many<Kv_##type, Head<dims>>(ATTENTION_ARGS);                                                                \
    }
EACH_KV_HEAD(ENTRY)
