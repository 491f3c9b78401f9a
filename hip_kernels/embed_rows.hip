#include "device.h"
#include "embed_rows.h"

EACH_QUANT(EMBED_ROWS)
EACH_FLOAT(EMBED_ROWS)
