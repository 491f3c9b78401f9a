#include "attention_many.h"

#define ENTRY(type) \
    KERNEL(attention_latent_##type, LatentHead::THREADS, 1)(ATTENTION_PARAMS) { attention_many<Kv_##type, LatentHead>(ATTENTION_ARGS); }
EACH_KV(ENTRY)
